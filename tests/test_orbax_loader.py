"""Orbax checkpoints: exact round trips, other device counts, and names for everything that does not fit."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from pagedjax.config import ModelConfig, RopeConfig
from pagedjax.loaders import orbax
from pagedjax.loaders.param_shapes import flatten, map_shapes, param_shapes

CONFIG = ModelConfig(
    family="qwen3",
    vocab_size=24,
    hidden_size=16,
    intermediate_size=32,
    num_layers=2,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    rms_norm_eps=1e-6,
    rope=RopeConfig(theta=1e6, kind="yarn", factor=4.0, original_max_position=16, attention_factor=1.5),
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
    qk_norm=True,
    sliding_windows=(None, 8),
    num_tokens=20,
)


def random_params(config=CONFIG, dtype=np.float32):
    rng = np.random.default_rng(0)
    return map_shapes(lambda shape: rng.standard_normal(shape).astype(dtype), param_shapes(config))


def assert_equal(found, expected):
    found, expected = flatten(found), flatten(expected)
    assert found.keys() == expected.keys()
    for name, leaf in expected.items():
        assert found[name].dtype == leaf.dtype, name
        np.testing.assert_array_equal(np.asarray(found[name]), leaf, err_msg=name)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_round_trip_on_the_host(tmp_path, dtype):
    params = random_params(dtype=dtype)
    orbax.save(tmp_path / "c", CONFIG, params)
    config, loaded = orbax.load(tmp_path / "c")
    assert config == CONFIG
    assert hash(config) == hash(CONFIG)
    assert all(isinstance(leaf, np.ndarray) for leaf in flatten(loaded).values())
    assert_equal(loaded, params)


def test_smallest_configuration(tmp_path):
    config = dataclasses.replace(
        CONFIG,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        qk_norm=False,
        tie_word_embeddings=True,
        sliding_windows=None,
        num_tokens=None,
        rope=RopeConfig(),
    )
    params = random_params(config)
    assert len(flatten(params)) == 8
    orbax.save(tmp_path / "c", config, params)
    assert orbax.load(tmp_path / "c")[0] == config


def test_onto_a_device_in_another_dtype(tmp_path):
    params = random_params()
    orbax.save(tmp_path / "c", CONFIG, jax.tree.map(jnp.asarray, params))
    sharding = SingleDeviceSharding(jax.devices()[0])
    for given in (sharding, jax.tree.map(lambda _: sharding, params)):
        _, loaded = orbax.load(tmp_path / "c", dtype="bfloat16", sharding=given)
        assert all(leaf.sharding == sharding for leaf in flatten(loaded).values())
        assert_equal(loaded, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params))
    _, loaded = orbax.load(tmp_path / "c", dtype=np.float16)
    assert_equal(loaded, jax.tree.map(lambda leaf: leaf.astype(np.float16), params))


DEVICES = """
import sys
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
sys.path.insert(0, {tests!r})
from test_orbax_loader import CONFIG, assert_equal, random_params
from pagedjax.loaders import orbax

assert jax.device_count() == {count}
mesh = jax.make_mesh(({count},), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
params = random_params()

def place(leaf):
    last = leaf.shape[-1] % {count} == 0 and leaf.ndim > 1
    return NamedSharding(mesh, PartitionSpec(*[None] * (leaf.ndim - 1), "model") if last else PartitionSpec())

shardings = jax.tree.map(place, params)
if {action!r} == "save":
    orbax.save({folder!r}, CONFIG, jax.device_put(params, shardings))
elif {action!r} == "load":
    for given in (shardings, NamedSharding(mesh, PartitionSpec())):
        config, loaded = orbax.load({folder!r}, sharding=given)
        assert config == CONFIG
        expected = given if isinstance(given, dict) else jax.tree.map(lambda _: given, params)
        assert jax.tree.leaves(jax.tree.map(lambda leaf: leaf.sharding, loaded)) == jax.tree.leaves(expected)
        assert_equal(loaded, params)
    assert_equal(orbax.load({folder!r})[1], params)
else:
    # A process of its own: one that has read the arrays may have them cached, and the reads that are still in flight
    # when the load fails complain on stderr from their own threads.
    try:
        orbax.load({folder!r})
    except ValueError as error:
        assert "params can't be restored" in str(error) and "it is damaged" in str(error), error
    else:
        raise AssertionError("the data is gone, and it loads")
"""


def run_on_devices(count, folder, action):
    code = DEVICES.format(tests=os.path.dirname(__file__), count=count, folder=str(folder), action=action)
    env = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={count}", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


def test_saved_on_four_devices_restored_on_one_and_two_then_damaged(tmp_path):
    run_on_devices(4, tmp_path / "c", "save")
    assert_equal(orbax.load(tmp_path / "c")[1], random_params())
    sharding = SingleDeviceSharding(jax.devices()[0])
    assert_equal(orbax.load(tmp_path / "c", sharding=sharding)[1], random_params())
    run_on_devices(2, tmp_path / "c", "load")
    files = list((tmp_path / "c" / "params").glob("ocdbt.process_*/d/*"))
    assert files
    for data in files:  # whole: what a save groups into which file varies, and the end of one may be stale
        data.write_bytes(b"")
    run_on_devices(1, tmp_path / "c", "load damaged")


def test_text_files_come_along(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "tool_use.jinja").write_text("{{ tools }}")
    extras = [tmp_path / "tokenizer.json", str(tmp_path / "chat_template.jinja"), tmp_path / "more"]
    orbax.save(tmp_path / "c", CONFIG, random_params(), extras)
    names = sorted(path.name for path in (tmp_path / "c").iterdir())
    assert names == ["chat_template.jinja", "more", "pagedjax.json", "params", "tokenizer.json"]
    assert (tmp_path / "c" / "more" / "tool_use.jinja").read_text() == "{{ tools }}"
    assert (tmp_path / "c" / "chat_template.jinja").read_text() == "{{ messages }}"


def test_an_unfinished_save_is_no_checkpoint(tmp_path):
    with pytest.raises(FileNotFoundError):
        orbax.save(tmp_path / "c", CONFIG, random_params(), [tmp_path / "absent.json"])
    assert not orbax.is_checkpoint(tmp_path / "c")
    with pytest.raises(ValueError, match=r"no pagedjax\.json: it is not a checkpoint of pagedjax, or saving it was"):
        orbax.load(tmp_path / "c")


def test_a_folder_in_use_is_not_written_to(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="exists and is not an empty folder"):
        orbax.save(tmp_path, CONFIG, random_params())
    with pytest.raises(ValueError, match="exists and is not an empty folder"):
        orbax.save(tmp_path / "notes.txt", CONFIG, random_params())


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("orbax") / "c"
    orbax.save(folder, CONFIG, random_params())
    return folder


def without(params, *path):
    params = copy.deepcopy(params)
    parent = params
    for key in path[:-1]:
        parent = parent[key]
    del parent[path[-1]]
    return params


def test_params_that_do_not_fit_are_not_saved(tmp_path):
    params = random_params()
    with pytest.raises(ValueError, match=r"the params: the parameters lack layers\.mlp\.down\.bias;"):
        orbax.save(tmp_path / "c", CONFIG, without(params, "layers", "mlp", "down", "bias"))
    with pytest.raises(ValueError, match=r"lack lm_head\.kernel and have the unknown layers\.gate, lm_head\.weight;"):
        orbax.save(
            tmp_path / "c",
            CONFIG,
            params | {"lm_head": {"weight": np.ones(3)}, "layers": params["layers"] | {"gate": np.ones(3)}},
        )
    with pytest.raises(ValueError, match=r"final_norm\.scale has shape \(3,\), and the configuration makes it \(16,\)"):
        orbax.save(tmp_path / "c", CONFIG, params | {"final_norm": {"scale": np.ones(3)}})
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qk_norm": False}, r"have the unknown layers\.attention\.k_norm\.scale, layers\.attention\.q_norm\.scale;"),
        ({"tie_word_embeddings": True}, r"have the unknown lm_head\.kernel;"),
        ({"vocab_size": 25}, r"embed\.embedding has shape \(24, 16\), and the configuration makes it \(25, 16\)"),
        ({"family": None, "colour": "red"}, r"does not hold a configuration .*colour"),
        ({"rope": {"speed": 1}}, r"does not hold a configuration .*speed"),
        ({"num_kv_heads": 3}, r"num_q_heads \(4\) is not a multiple"),
    ],
)
def test_arrays_that_do_not_fit_the_configuration(tmp_path, saved, changes, message):
    folder = tmp_path / "c"
    shutil.copytree(saved, folder)
    content = json.loads((folder / "pagedjax.json").read_text())
    content["config"] |= changes
    (folder / "pagedjax.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        orbax.load(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "format None, version None"),
        ('{"format": "pagedjax", "version": 2, "config": {}}', "version 2; this package reads 'pagedjax', version 1"),
        ('{"format": "pagedjax", "version": 1}', "does not hold a configuration"),
        ('{"format": "pagedjax", "version": 1, "config": {"rope": {}, "sliding_windows": null}}', "family"),
    ],
)
def test_a_configuration_file_that_is_not_ours(tmp_path, text, message):
    (tmp_path / "pagedjax.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        orbax.load(tmp_path)


def test_folders_that_are_no_checkpoint(tmp_path, saved):
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        orbax.load(tmp_path / "absent")
    with pytest.raises(ValueError, match=r"has no pagedjax\.json"):
        orbax.load(tmp_path)
    shutil.copy(saved / "pagedjax.json", tmp_path)
    with pytest.raises(ValueError, match=r"params can't be read as an Orbax checkpoint"):
        orbax.load(tmp_path)


def test_metadata_that_was_damaged(tmp_path, saved):
    folder = tmp_path / "c"
    shutil.copytree(saved, folder)
    (folder / "params" / "_METADATA").write_text("{")
    with pytest.raises(
        ValueError, match=r"params can't be read as an Orbax checkpoint: a file of it is missing or dam"
    ):
        orbax.load(folder)


@pytest.mark.parametrize("dtype", [np.int32, "floaty"])
def test_a_dtype_that_is_no_float_is_refused(saved, dtype):
    with pytest.raises(ValueError, match=r"dtype is int32; parameters can be|'floaty' is not a dtype"):
        orbax.load(saved, dtype=dtype)


def test_a_key_missing_from_the_checkpoint_names_itself(tmp_path: pathlib.Path) -> None:
    config = dataclasses.replace(CONFIG, tie_word_embeddings=True)
    orbax.save(tmp_path / "c", config, random_params(config))
    path = tmp_path / "c" / "pagedjax.json"
    content = json.loads(path.read_text())
    content["config"]["tie_word_embeddings"] = False
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"lack lm_head\.kernel"):
        orbax.load(tmp_path / "c")
