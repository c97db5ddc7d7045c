"""Configuration: defaults, overrides, refusals that teach."""

from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from pdserve.cluster.base.config import DeploymentConfig, field_help, load_config, to_yaml
from pdserve.cluster.base.environment import cache_dir, child_environment, state_dir
from pdserve.cluster.base.errors import ConfigError
from pdserve.cluster.base.kv_layout import KVDtype
from pdserve.cluster.base.worker_info import Role


def test_the_shown_configuration_loads_to_itself(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(load_config(None, {"engine.block_size": "32", "workers.mixed": "2"})))
    assert load_config(path) == load_config(None, {"engine.block_size": "32", "workers.mixed": "2"})


@pytest.mark.parametrize(
    ("overrides", "counts"),
    [
        ({}, (1, 1, 0)),
        ({"workers.mixed": "2"}, (0, 0, 2)),
        ({"workers.decode": "2", "workers.prefill": "3"}, (3, 2, 0)),
        ({"workers.decode": "1"}, (0, 1, 0)),
        ({"workers.num_cpus": "2"}, (1, 1, 0)),
    ],
)
def test_without_numbers_there_is_one_prefill_and_one_decode_worker(
    overrides: dict[str, str], counts: tuple[int, int, int]
) -> None:
    workers = load_config(None, overrides).workers
    assert (workers.prefill, workers.decode, workers.mixed) == counts


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("ingress: {port: 9000}\nengine: {linear: fp32}\n")
    config = load_config(path, {"ingress.port": "9001"})
    assert (config.ingress.port, config.engine.linear) == (9001, "fp32")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("engine.blok_size", "16", "engine.blok_size: unknown key; did you mean 'block_size'?"),
        ("tensor_paralel_size", "2", "tensor_paralel_size: unknown key; known keys: name, model, engine"),
        ("ingres.port", "1", "ingres: unknown key; did you mean 'ingress'?"),
        ("engine.block_size", "0", "engine.block_size"),
        ("engine.block_size", "24", "engine.block_size"),
        ("engine.linear", "fp8", "engine.linear: Input should be 'fp32', 'fp16' or 'int8'"),
        ("engine.kv_memory_gib", ".nan", "engine.kv_memory_gib"),
        ("engine.kv_memory_gib", "-1", "engine.kv_memory_gib"),
        ("engine.kv_dtype", "float8", "engine.kv_dtype float8: on cuda only"),
        ("engine.attention", "varlen", "engine.attention varlen: on cuda only"),
        ("engine.device", "tpu", "engine.device"),
        ("workers.mixed", "-1", "workers.mixed"),
        ("workers.mixed", "0", "at least one decode or mixed worker"),
        ("workers.prefill", "2", "prefill workers need a decode worker"),
        ("workers", "", "workers: Input should be"),
        ("workers", "3", "workers: Input should be"),
        ("transfer.max_slots", "3", "base_slots <= max_slots_per_link"),
        ("transfer.transports", "[]", "transfer.transports"),
        ("transfer.transports", "[carrier-pigeon]", "transfer.transports"),
        ("transfer.base_slots", "99", "base_slots <= max_slots_per_link"),
        ("workers.num_cpus", "'two'", "workers.num_cpus"),
        ("ingress.port", "70000", "ingress.port"),
        ("channel.silence_s", "0.5", "channel.silence_s must be longer than channel.heartbeat_s"),
        ("name", "'Bad Name'", "name"),
        ("name.inner", "1", "name"),
        ("engine.block_size", "[", "is not a YAML value"),
    ],
)
def test_bad_keys_and_values_are_refused_by_path(key: str, value: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, {key: value})
    assert message in str(caught.value)


def test_more_decode_workers_than_links_have_slots_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"transfer\.max_slots 64: 33 decode workers need 66"):
        load_config(None, {"workers.decode": "33", "workers.prefill": "1"})
    assert load_config(None, {"workers.decode": "33"}).workers.decode == 33


@pytest.mark.parametrize("text", ["- a\n- b\n", "a: [", "5\n"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        load_config(path)


def test_a_value_where_a_section_belongs_is_refused_as_an_override(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("engine: 5\n")
    with pytest.raises(ConfigError, match=r"engine\.block_size: engine is a value"):
        load_config(path, {"engine.block_size": "16"})


def test_an_empty_file_means_defaults(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("")
    assert load_config(tmp_path / "empty.yaml") == DeploymentConfig()


def documented_keys(section: type[BaseModel], prefix: str = "") -> list[str]:
    keys = []
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            keys += documented_keys(kind, f"{prefix}{name}.")
        else:
            keys.append(f"{prefix}{name}")
    return keys


@pytest.mark.parametrize("key", documented_keys(DeploymentConfig))
def test_every_key_is_documented(key: str) -> None:
    assert len(field_help(key)) > 10
    with pytest.raises(KeyError):
        field_help(f"{key}x")


def test_every_key_is_read_somewhere() -> None:
    root = Path(__file__).parents[3]
    code = "".join(
        path.read_text()
        for folder in ("cluster", "kvtransfer", "workers", "router", "deploy")
        for path in (root / folder).rglob("*.py")
    )
    ignored = [key for key in documented_keys(DeploymentConfig) if f".{key.rpartition('.')[2]}" not in code]
    assert ignored == []


def test_the_configuration_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_config(None).engine.block_size = 32  # type: ignore[misc]


def test_threads_follow_the_cpus_unless_set() -> None:
    assert load_config(None, {"workers.num_cpus": "0.5"}).threads_of(Role.MIXED) == 1
    assert load_config(None, {"workers.num_cpus": "3"}).threads_of(Role.PREFILL) == 3
    config = load_config(None, {"engine.num_threads": "2", "workers.engine.decode.num_threads": "4"})
    assert [config.threads_of(role) for role in (Role.PREFILL, Role.DECODE)] == [2, 4]


def test_folders_follow_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("PDSERVE_STATE_DIR", "PDSERVE_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "s"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "c"))
    assert state_dir() == tmp_path / "s" / "pdserve"
    assert cache_dir() == tmp_path / "c" / "pdserve"
    monkeypatch.setenv("PDSERVE_STATE_DIR", str(tmp_path / "x"))
    assert state_dir() == tmp_path / "x"


def test_foreign_ray_settings_do_not_reach_our_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "somewhere:6379")
    monkeypatch.setenv("RAY_SERVE_HAPROXY_STATS_PORT", "1")
    environment = child_environment({"RAY_SERVE_ENABLE_HA_PROXY": "1"})
    assert "RAY_ADDRESS" not in environment
    assert "RAY_SERVE_HAPROXY_STATS_PORT" not in environment
    assert environment["RAY_SERVE_ENABLE_HA_PROXY"] == "1"


def test_the_yaml_of_the_defaults_holds_every_section() -> None:
    tree = yaml.safe_load(to_yaml(DeploymentConfig()))
    assert set(tree) == set(DeploymentConfig.model_fields)


def test_a_role_may_differ_in_its_engine() -> None:
    config = load_config(
        None,
        {
            "engine.kv_dtype": "float32",
            "workers.engine.decode.kv_dtype": "int8",
            "workers.engine.decode.block_size": "32",
            "workers.engine.prefill.max_batch_tokens": "1024",
        },
    )
    prefill, decode, mixed = (config.engine_of(role) for role in (Role.PREFILL, Role.DECODE, Role.MIXED))
    assert (prefill.kv_dtype, prefill.block_size, prefill.max_batch_tokens) == (KVDtype.FLOAT32, 16, 1024)
    assert (decode.kv_dtype, decode.block_size, decode.max_batch_tokens) == (KVDtype.INT8, 32, 128)
    assert mixed == config.engine
    own = load_config(None, {"workers.engine.decode.max_batch_tokens": "512"})
    assert own.engine_of(Role.DECODE).max_batch_tokens == 512


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        (
            "workers.engine.decode.kv_type",
            "int8",
            "decode.kv_type: unknown key; did you mean 'kv_dtype'?",
        ),
        (
            "workers.engine.decode.block_size",
            "17",
            "workers.engine.decode.block_size: Input should be a multiple of 16",
        ),
        ("workers.engine.decoder.block_size", "32", "workers.engine.decoder"),
        ("workers.engine.decode.device", "cuda", "workers.engine.decode.device: all workers run on one device"),
    ],
)
def test_what_a_role_cannot_have_is_refused_with_its_path(key: str, value: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, {key: value})
    assert reason in str(caught.value)
