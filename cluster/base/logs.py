"""Log format of every process: one line an event, to standard error."""

import logging


def configure_logging(level: int = logging.INFO) -> None:
    """Set up the pdserve loggers of this process; repeated calls change nothing."""
    root = logging.getLogger("pdserve")
    if root.handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    root.addHandler(handler)
    root.setLevel(level)
    root.propagate = False
