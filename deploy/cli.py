"""The `pdserve` command.

Ray and model code are loaded by the commands that need them, so help and errors are quick.
"""

import contextlib
import io
import json
import logging
import secrets
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console

from pdserve.cluster.base.config import DeploymentConfig, field_default, field_help, load_config, to_yaml
from pdserve.cluster.base.environment import authenticate_to_ray, cache_dir, state_dir
from pdserve.cluster.base.errors import ClientError, ConfigError, PdserveError, RetryableError
from pdserve.cluster.base.version import VERSION
from pdserve.deploy.demo import DEFAULT_PROMPT, curl_line, stream_answer
from pdserve.deploy.guardian import Guardian
from pdserve.deploy.operations import operations
from pdserve.deploy.records import DeploymentRecord, RecordStore
from pdserve.deploy.screen import ProgressLines

application = typer.Typer(
    name="pdserve",
    help="Serve large language models on Ray. Start with `pdserve demo`, or `pdserve up --model FOLDER`.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
model_commands = typer.Typer(help="Models: convert them ahead of time.", no_args_is_help=True)
config_commands = typer.Typer(help="Configuration: show the effective one, or its schema.", no_args_is_help=True)
application.registered_commands += operations.registered_commands
application.add_typer(model_commands, name="model")
application.add_typer(config_commands, name="config")

# No markup: names, paths and causes are shown as they are.
console = Console(stderr=True, highlight=False, markup=False)


def say(line: str) -> None:
    """Show a line to whoever runs the command."""
    console.print(line, soft_wrap=True)


HEAD_CHECK_S = 1.0
POLL_S = 0.3

ConfigFile = Annotated[
    Path | None, typer.Option("--config", "-c", help="YAML file; see `pdserve config schema`.", show_default=False)
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="KEY=VALUE", help="Set any key, for example engine.block_size=32."),
]
Name = Annotated[str | None, typer.Option("--name", help="Name of the deployment.", show_default=False)]


def _option(flag: str, key: str) -> typer.models.OptionInfo:
    """Return an option that sets one configuration key; its help is the key's own."""
    text = f"{field_help(key)} ({key}; default {field_default(key)})"
    info: typer.models.OptionInfo = typer.Option(flag, help=text, show_default=False)
    return info


Model = Annotated[str | None, _option("--model", "model.path")]
Revision = Annotated[str | None, _option("--revision", "model.revision")]
Host = Annotated[str | None, _option("--host", "ingress.host")]
Port = Annotated[int | None, _option("--port", "ingress.port")]
Prefill = Annotated[int | None, _option("--prefill", "workers.prefill")]
Decode = Annotated[int | None, _option("--decode", "workers.decode")]
Mixed = Annotated[int | None, _option("--mixed", "workers.mixed")]
Tp = Annotated[int | None, _option("--tp", "engine.tensor_parallel")]
PrefillTp = Annotated[
    int | None,
    typer.Option(
        "--prefill-tp",
        help="Ranks of each prefill worker (workers.engine.prefill.tensor_parallel; default that of engine).",
        show_default=False,
    ),
]
DecodeTp = Annotated[
    int | None,
    typer.Option(
        "--decode-tp",
        help="Ranks of each decode worker (workers.engine.decode.tensor_parallel; default that of engine).",
        show_default=False,
    ),
]
Linear = Annotated[str | None, _option("--linear", "engine.linear")]


def _load(config: Path | None, settings: list[str] | None, **flags: str | int | None) -> DeploymentConfig:
    """Merge file, --set and flags; later ones win."""
    overrides = {}
    for setting in settings or []:
        key, separator, value = setting.partition("=")
        if not separator:
            raise ConfigError(f"--set {setting}: must be KEY=VALUE")
        overrides[key.strip()] = value
    overrides |= {key.replace("__", "."): json.dumps(value) for key, value in flags.items() if value is not None}
    return load_config(config, overrides)


@application.command()
def up(
    config: ConfigFile = None,
    settings: Settings = None,
    name: Name = None,
    model: Model = None,
    revision: Revision = None,
    host: Host = None,
    port: Port = None,
    prefill: Prefill = None,
    decode: Decode = None,
    mixed: Mixed = None,
    tp: Tp = None,
    prefill_tp: PrefillTp = None,
    decode_tp: DecodeTp = None,
    linear: Linear = None,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Return when it serves; `pdserve down` stops it.")
    ] = False,
) -> None:
    """Start a deployment: Ray, the controller, workers and the HTTP ingress.

    Without numbers of workers: one prefill and one decode worker. In the foreground it runs until Ctrl-C and leaves
    nothing behind.
    """
    merged = _load(
        config,
        settings,
        name=name,
        model__path=model,
        model__revision=revision,
        ingress__host=host,
        ingress__port=port,
        workers__prefill=prefill,
        workers__decode=decode,
        workers__mixed=mixed,
        engine__tensor_parallel=tp,
        workers__engine__prefill__tensor_parallel=prefill_tp,
        workers__engine__decode__tensor_parallel=decode_tp,
        engine__linear=linear,
    )
    with _Running(merged, stays=detach) as record:
        _show_urls(record)
        if not detach:
            console.print("Ctrl-C stops it.")
            _wait_for_end(record)


@application.command()
def demo(
    once: Annotated[bool, typer.Option("--once", help="Stop after the answer; leave nothing running.")] = False,
    prompt: Annotated[str, typer.Option("--prompt", help="What to continue.")] = DEFAULT_PROMPT,
    config: ConfigFile = None,
    settings: Settings = None,
    name: Name = None,
    port: Port = None,
) -> None:
    """Serve the demo model (Gemma-3-270M) and stream an answer.

    The deployment is called pdserve-demo unless told otherwise; with --once it takes a free port.
    """
    defaults = [] if config else ["name=pdserve-demo", *(["ingress.port=0"] if once else [])]
    merged = _load(config, [*defaults, *(settings or [])], name=name, ingress__port=port)
    with _Running(merged, stays=False) as record:
        stream_answer(record, prompt, sys.stdout)
        if once:
            return
        _show_urls(record)
        console.print("Ctrl-C stops it.")
        _wait_for_end(record)


@application.command()
def down(name: Annotated[str, typer.Option("--name", help="Name of the deployment.")] = "pdserve") -> None:
    """Stop a deployment and remove everything it started."""
    _authenticate(name)
    from pdserve.deploy.running import take_down

    if take_down(name, say):
        say("stopped")
    else:
        console.print(f"no deployment {name!r} is recorded here")


@model_commands.command("prepare")
def model_prepare(
    path: Annotated[str, typer.Argument(help="A folder, a .gguf file, a hub id, or `demo`.")] = "demo",
    revision: Revision = None,
) -> None:
    """Download or convert a model into the cache, so that the next start is quick. Prints the folder."""
    from pdserve.workers.model.source import prepare_model

    with ProgressLines(console) as progress:
        folder = prepare_model(path, cache_dir(), progress.show, revision)
    typer.echo(folder)


@config_commands.command("show")
def config_show(config: ConfigFile = None, settings: Settings = None) -> None:
    """Print the whole configuration that `up` would use, as YAML: a start for a file of your own."""
    typer.echo(to_yaml(_load(config, settings)), nl=False)


@config_commands.command("schema")
def config_schema() -> None:
    """Print the JSON schema of the configuration, with every key's documentation."""
    typer.echo(json.dumps(DeploymentConfig.model_json_schema(), indent=2))


@application.command()
def version() -> None:
    """Print the version."""
    typer.echo(VERSION)


class _Running:
    """A deployment that is up inside the context; outside it is down, unless it `stays`."""

    def __init__(self, config: DeploymentConfig, *, stays: bool) -> None:
        self._config = config
        self._stays = stays
        self._guardian: Guardian | None = None

    def __enter__(self) -> DeploymentRecord:
        ray_token = secrets.token_hex(32)
        authenticate_to_ray(ray_token)
        from pdserve.deploy.app import Launch, prepare

        # Both, by ourselves: a shell that starts us in the background has SIGINT ignored.
        signal.signal(signal.SIGINT, _interrupt)
        signal.signal(signal.SIGTERM, _interrupt)
        with ProgressLines(console) as progress, RecordStore(state_dir()).locked(self._config.name):
            config, model = prepare(self._config, progress.show, progress.say)
            self._guardian = Guardian(config.name)
            try:
                return Launch(config, model, ray_token, progress.say).up()
            except BaseException:
                self._stop()
                raise

    def __exit__(self, *error: object) -> None:
        assert self._guardian is not None
        if self._stays:
            self._guardian.release()
        else:
            self._stop()

    def _stop(self) -> None:
        """Take the deployment down; a second Ctrl-C does not leave half of it."""
        from pdserve.deploy.running import take_down, uninterrupted

        assert self._guardian is not None
        # To the process that created it, Ray prints on standard output that Serve's controller has ended, as an error.
        with uninterrupted(), contextlib.redirect_stdout(io.StringIO()):
            take_down(self._config.name, say)
        # If that raised, the guardian's pipe closes with us, and it tries again.
        self._guardian.release()
        say("stopped")


def _authenticate(name: str) -> None:
    """Take the token of a recorded deployment, before anything imports Ray."""
    record = RecordStore(state_dir()).load(name)
    if record is not None:
        authenticate_to_ray(record.ray_token)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _wait_for_end(record: DeploymentRecord) -> None:
    """Return on Ctrl-C; raises RetryableError if the deployment ended by itself."""
    try:
        while record.head.is_alive:
            time.sleep(HEAD_CHECK_S)
    except KeyboardInterrupt:
        return
    raise RetryableError("the deployment's Ray head has ended")


def _show_urls(record: DeploymentRecord) -> None:
    console.print(f"{record.served_name} is served at {record.url}/v1 (deployment {record.name!r})")
    for path in ("health", "ready", "metrics"):
        say(f"{path:<8} {record.url}/{path}")
    console.print(curl_line(record), soft_wrap=True)


def main() -> None:
    """Run the command; errors of ours are one line, without a traceback."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    try:
        application()
    except PdserveError as error:
        console.print(f"error: {error}", style="red", soft_wrap=True)
        sys.exit(2 if isinstance(error, ClientError) else 1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
