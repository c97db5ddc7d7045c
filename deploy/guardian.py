"""Takes a deployment down when the command that started it dies: `python -m pdserve.deploy.guardian NAME`.

The command holds the other end of this process's standard input. An orderly end writes RELEASE first; end of file
without it means that the command was killed.
"""

import subprocess
import sys

from pdserve.cluster.base.environment import authenticate_to_ray, state_dir
from pdserve.deploy.records import RecordStore

RELEASE = b"released\n"


class Guardian:
    """The command's side."""

    def __init__(self, name: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pdserve.deploy.guardian", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def release(self) -> None:
        """The deployment is down, or stays up on purpose: end the guardian."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(RELEASE)
            self._process.stdin.close()
        except BrokenPipeError:
            pass  # it has ended already: there is nothing left to guard
        self._process.wait()


def main(name: str) -> int:
    """Wait for the command's end."""
    if sys.stdin.buffer.read() != RELEASE:
        record = RecordStore(state_dir()).load(name)
        if record is None:
            return 0
        authenticate_to_ray(record.ray_token)
        # Loaded only now: Ray reads its token when it is imported, and most guardians never need it.
        from pdserve.deploy.running import take_down

        take_down(name, lambda line: None)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
