"""Claim: `import --lastkv-chunk` adds gates and the key in config.json to a model, empties the history (keys and
values of the last layer) and changes nothing else; what
`export` writes then is a Hugging Face directory that imports again without options, bit for bit, in any layout; a run
that converts while it loads has the same model; a contradiction is an error that names key and file.

Why the tests show it: directories written by transformers (tied, sharded, bfloat16, float16, mixed dtypes) are
converted by one rank and exported by four (tp 2, pp 2), and the reverse, and all files are compared; gates are then
replaced by random ones, so that a head or a layer mixed up would show, and go around again. Log-probabilities of
the same model from five sources are compared bit for bit, in two layouts, and with those of other gates, another
chunk size and full attention, which must differ. Training state is held against an uninterrupted run.
Not shown: what LastKV attention computes (tests/lastkv), Transformer Engine modules, gradients of real replays.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import World, run_world
from harness.verbs import run_verb
from oracle.tiny_models import make_hf_dir
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from megatron_lrl.checkpoint.publish import incomplete_path
from megatron_lrl.checkpoint.safetensors_io import SafetensorsReader

ONE, FOUR = World(), World(tp=2, pp=2)
RANKS = "checkpoint.lastkv_ranks"
LAYERS, KV_HEADS = 4, 2
# source -> options of its import, dtype of its gates in an exported directory
CASES: dict[str, tuple[dict[str, Any], torch.dtype]] = {
    "qwen3-f32": ({"chunk": 8}, torch.float32),
    "llama-bf16-sharded-tied": ({"chunk": 3, "blend": False, "gate_init": 0.25}, torch.bfloat16),
    "qwen2-mixed": ({"chunk": 512, "gate_init": 0.9}, torch.float32),
    "llama-fp16": ({"chunk": 8}, torch.float32),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the dense sources."""
    root = tmp_path_factory.mktemp("lastkv")
    make_hf_dir(root / "qwen3-f32", "qwen3", 3)
    make_hf_dir(
        root / "llama-bf16-sharded-tied", "llama", 4, tied=True, dtype=torch.bfloat16, max_shard_size="20KB"
    )
    mixed = make_hf_dir(root / "qwen2-mixed", "qwen2", 5, dtype=torch.bfloat16)
    tensors = load_file(mixed / "model.safetensors")
    norms = {name: t.float() + 1e-4 for name, t in tensors.items() if name.endswith("norm.weight")}
    save_file({**tensors, **norms}, mixed / "model.safetensors", metadata={"format": "pt"})
    (mixed / "tokenizer.json").write_text('{"any": "content"}')
    make_hf_dir(root / "llama-fp16", "llama", 6, dtype=torch.float16, vocab=5)
    return root


@pytest.fixture(scope="module")
def exported(root: Path) -> dict[str, Path]:
    """Source -> its LastKV directory, imported by one rank (CASE-ckpt) and exported by four."""
    _convert(ONE, [("import", root / name, root / f"{name}-ckpt", CASES[name][0]) for name in CASES])
    targets = {name: root / f"{name}-lastkv" for name in CASES}
    _convert(FOUR, [("export", root / f"{name}-ckpt", target, {}) for name, target in targets.items()])
    return targets


@pytest.fixture(scope="module")
def trained(root: Path, exported: dict[str, Path]) -> dict[str, Path]:
    """Source -> its LastKV directory with random gates."""
    generator = torch.Generator().manual_seed(1)
    targets = {name: root / f"{name}-gates" for name in CASES}
    for name, target in targets.items():
        shutil.copytree(exported[name], target)
        for path in target.glob("*.safetensors"):
            tensors = load_file(path)
            for key, tensor in tensors.items():
                if _is_gate(key):
                    tensors[key] = torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
            save_file(tensors, path, metadata={"format": "pt"})
    return targets


def _is_gate(name: str) -> bool:
    return name.endswith("lastkv_gate")


def _convert(world: World, cases: list[tuple[str, Path, Path, dict[str, Any]]]) -> None:
    plain = [(verb, str(source), str(target), options) for verb, source, target, options in cases]
    run_world(world, f"{RANKS}:convert", cases=plain)


def _stored(directory: Path) -> dict[str, tuple[str, torch.Tensor]]:
    """Name -> (file, tensor) of all safetensors files of a directory."""
    tensors = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as handle:
            tensors |= {name: (path.name, handle.get_tensor(name)) for name in handle.keys()}  # noqa: SIM118
    return tensors


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    return one.dtype == other.dtype and torch.equal(one.view(bits), other.view(bits))


def _assert_same_directory(found: Path, expected: Path) -> None:
    """The same files; safetensors may order their tensors differently, all else is equal byte for byte."""
    assert sorted(p.name for p in found.iterdir()) == sorted(p.name for p in expected.iterdir())
    ours, theirs = _stored(found), _stored(expected)
    assert ours.keys() == theirs.keys() and len(theirs) > 20
    for name, (file, tensor) in theirs.items():
        assert ours[name][0] == file and _same_bits(ours[name][1], tensor), name
    for path in expected.iterdir():
        if path.suffix != ".safetensors":
            assert (found / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.parametrize("name", CASES)
def test_conversion_adds_gates_and_the_key_and_nothing_else(
    name: str, root: Path, exported: dict[str, Path]
) -> None:
    options, dtype = CASES[name]
    source, target = root / name, exported[name]
    assert sorted(p.name for p in target.iterdir()) == sorted(p.name for p in source.iterdir())
    before, after = _stored(source), _stored(target)
    gates = {f"model.layers.{layer}.self_attn.lastkv_gate" for layer in range(LAYERS)}
    assert after.keys() - before.keys() == gates and before.keys() <= after.keys()
    history = re.compile(rf"layers\.{LAYERS - 1}\.self_attn\.[kv]_proj\.")
    assert sum(bool(history.search(key)) for key in before) == (4 if name.startswith("qwen2") else 2)
    for key, (file, tensor) in before.items():
        expected = torch.zeros_like(tensor) if history.search(key) else tensor
        assert after[key][0] == file and _same_bits(after[key][1], expected), key
    alpha = options.get("gate_init", 0.1)
    logit = torch.tensor([math.log(alpha / (1 - alpha))] * KV_HEADS, dtype=torch.float64).to(dtype)
    assert all(_same_bits(after[key][1], logit) for key in gates)

    config = json.loads((source / "config.json").read_text())
    config["lastkv"] = {"chunk_size": options["chunk"], "blend": options.get("blend", True)}
    assert json.loads((target / "config.json").read_text()) == config
    unchanged = {"config.json", "model.safetensors.index.json"}
    for path in source.iterdir():
        if path.suffix != ".safetensors" and path.name not in unchanged:
            assert (target / path.name).read_bytes() == path.read_bytes(), path.name
    if (target / "model.safetensors.index.json").exists():
        index = json.loads((target / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(t.nbytes for _, t in after.values())
        assert index["weight_map"] == {key: file for key, (file, _) in after.items()}
    with SafetensorsReader(target) as reader:  # data of a tensor starts at a multiple of its element size
        position: dict[str, int] = {}
        for record in reader.layout.tensors:
            start = position.get(record.file, 0)
            assert start % (record.nbytes // math.prod(record.shape)) == 0, record.name
            position[record.file] = start + record.nbytes


def test_four_ranks_convert_as_one_does(root: Path, exported: dict[str, Path], tmp_path: Path) -> None:
    _convert(FOUR, [("import", root / name, tmp_path / f"{name}-ckpt", CASES[name][0]) for name in CASES])
    _convert(ONE, [("export", tmp_path / f"{name}-ckpt", tmp_path / name, {}) for name in CASES])
    for name in CASES:
        _assert_same_directory(tmp_path / name, exported[name])


@pytest.mark.parametrize(("importer", "exporter"), [(ONE, FOUR), (FOUR, ONE)], ids=lambda w: w.name)
def test_a_lastkv_directory_goes_around_bit_equal(
    importer: World, exporter: World, trained: dict[str, Path], tmp_path: Path
) -> None:
    named = {"chunk": 8}  # naming the model's own kind is no conversion
    options = {name: named if name == "qwen3-f32" else {} for name in CASES}
    _convert(importer, [("import", trained[n], tmp_path / f"{n}-ckpt", options[n]) for n in CASES])
    _convert(exporter, [("export", tmp_path / f"{name}-ckpt", tmp_path / name, {}) for name in CASES])
    for name in CASES:
        _assert_same_directory(tmp_path / name, trained[name])
        gates = torch.stack(
            [tensor for key, (_, tensor) in _stored(tmp_path / name).items() if _is_gate(key)]
        )
        assert gates.shape == (LAYERS, KV_HEADS) and gates.unique().numel() == gates.numel()


def test_the_command_line_reaches_the_conversion(
    root: Path, exported: dict[str, Path], tmp_path: Path
) -> None:
    name = "llama-bf16-sharded-tied"
    options = ["--lastkv-chunk", "3", "--no-lastkv-blend", "--lastkv-gate-init", "0.25"]
    run_verb(ONE, ["import", root / name, tmp_path / "ckpt", *options]).require_success()
    run_verb(ONE, ["export", tmp_path / "ckpt", tmp_path / "hf"]).require_success()
    _assert_same_directory(tmp_path / "hf", exported[name])
    for option in (["--no-lastkv-blend"], ["--lastkv-gate-init", "0.2"], ["--lastkv-chunk", "0"]):
        outcome = run_verb(ONE, ["import", root / name, tmp_path / "none", *option])
        assert outcome.codes == [2] and option[0] in outcome.err[0], outcome.err[0]
    assert not (tmp_path / "none").exists()


def _lastkv(source: str, *settings: str, dtype: str = "float32") -> list[str]:
    return [source, "model.attention=lastkv", f"model.dtype={dtype}", *settings]


@pytest.mark.parametrize("world", [ONE, FOUR], ids=lambda w: w.name)
def test_converting_on_load_gives_the_imported_model(
    world: World, root: Path, exported: dict[str, Path], tmp_path: Path
) -> None:
    dense = {name: tmp_path / f"{name}-dense" for name in CASES}
    _convert(ONE, [("import", root / name, dense[name], {}) for name in CASES])
    cases, options = [], []
    for name, (option, _) in CASES.items():
        kind = [
            f"lastkv.chunk_size={option['chunk']}",
            f"lastkv.blend={str(option.get('blend', True)).lower()}",
            f"lastkv.gate_init={option.get('gate_init', 0.1)}",
        ]
        cases += [
            _lastkv(f"model.checkpoint={root / f'{name}-ckpt'}"),
            _lastkv(f"model.hf={exported[name]}", *kind),  # settings that agree with the model
            _lastkv(f"model.hf={root / name}", *kind),
            _lastkv(f"model.checkpoint={dense[name]}", *kind),
        ]
        blended = " blend" if option.get("blend", True) else ""
        options.append(f"lastkv C={option['chunk']}{blended}")
    found = run_world(world, f"{RANKS}:loaded", cases=cases)
    assert all(result["unset"] == [] for rank in found for result in rank)
    for index, attention in enumerate(options):
        reference, *others = found[0][4 * index : 4 * index + 4]
        assert sum(map(_is_gate, reference["weights"])) == LAYERS
        assert reference["attention"] == attention
        for other in others:
            assert (other["attention"], other["model"]) == (reference["attention"], reference["model"])
            assert other["weights"].keys() == reference["weights"].keys()
            for key, tensor in reference["weights"].items():
                assert _same_bits(other["weights"][key], tensor), key


@pytest.mark.parametrize(
    ("world", "dtype"), [(ONE, "float32"), (ONE, "bfloat16"), (FOUR, "float32")], ids=str
)
def test_every_source_of_a_model_gives_the_same_log_probabilities(
    world: World, dtype: str, root: Path, exported: dict[str, Path], trained: dict[str, Path], tmp_path: Path
) -> None:
    prompt, response = [(7 * i) % 131 for i in range(21)], [(5 * i + 1) % 131 for i in range(14)]
    group = {"id": "g", "prompt_ids": prompt, "responses": [{"ids": response}, {"ids": response[:3]}]}
    (tmp_path / "t.jsonl").write_text(json.dumps(group) + "\n")
    name = "qwen3-f32"
    _convert(FOUR, [("import", trained[name], tmp_path / "gates-ckpt", {})])
    on_load = [f"model.hf={root / name}", "lastkv.chunk_size=8"]
    sources = {
        "imported": _lastkv(f"model.checkpoint={root / f'{name}-ckpt'}", dtype=dtype),
        "exported": _lastkv(f"model.hf={exported[name]}", dtype=dtype),
        "on load": _lastkv(*on_load, dtype=dtype),
        "gates": _lastkv(f"model.hf={trained[name]}", dtype=dtype),
        "gates imported": _lastkv(f"model.checkpoint={tmp_path / 'gates-ckpt'}", dtype=dtype),
        "another chunk": _lastkv(f"model.hf={root / name}", "lastkv.chunk_size=9", dtype=dtype),
        "full": [f"model.hf={root / name}", f"model.dtype={dtype}"],
    }
    cases = [(settings, str(tmp_path / f"{case}.jsonl")) for case, settings in sources.items()]
    run_world(world, f"{RANKS}:score", cases=cases, trajectories=str(tmp_path / "t.jsonl"))
    scores = {case: (tmp_path / f"{case}.jsonl").read_text() for case in sources}
    assert scores["imported"] == scores["exported"] == scores["on load"]
    assert scores["gates"] == scores["gates imported"]
    assert len(set(scores.values())) == 4


def _drop_a_gate(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.layers.2.self_attn.lastkv_gate"]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def _drop_the_key(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    del config["lastkv"]
    (directory / "config.json").write_text(json.dumps(config))


def _widen_a_gate(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    tensors["model.layers.1.self_attn.lastkv_gate"] = torch.zeros(4)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def test_contradictions_are_named(root: Path, exported: dict[str, Path], tmp_path: Path) -> None:
    name = "qwen3-f32"
    dense, lastkv, ckpt = root / name, exported[name], root / f"{name}-ckpt"
    faulty = {fault: tmp_path / fault.__name__ for fault in (_drop_a_gate, _drop_the_key, _widen_a_gate)}
    for fault, directory in faulty.items():
        shutil.copytree(lastkv, directory)
        fault(directory)
    keyed = tmp_path / "keyed"
    shutil.copytree(dense, keyed)
    config = json.loads((keyed / "config.json").read_text())
    (keyed / "config.json").write_text(json.dumps({**config, "lastkv": {"chunk_size": 8, "blend": True}}))
    edited = tmp_path / "edited"  # a checkpoint whose chunk size was changed by hand
    shutil.copytree(ckpt, edited)
    config = json.loads((edited / "hf" / "config.json").read_text())
    (edited / "hf" / "config.json").write_text(
        json.dumps({**config, "lastkv": {"chunk_size": 16, "blend": True}})
    )

    def load(*settings: str) -> tuple[str, Path, Path, dict[str, Any]]:
        return ("load", dense, dense, {"settings": settings})

    target, config_file = tmp_path / "target", str(lastkv / "config.json")
    in_ckpt = str(ckpt / "hf" / "config.json")
    expected = [
        (("import", lastkv, target, {"chunk": 16}), (config_file, '"chunk_size": 8', '"chunk_size": 16')),
        (("import", lastkv, target, {"chunk": 8, "blend": False}), (config_file, '"blend": false')),
        (("import", lastkv, target, {"chunk": 8, "gate_init": 0.2}), (config_file, "--lastkv-gate-init")),
        (("import", dense, target, {"chunk": 8, "gate_init": 1.0}), ("gate_init = 1", "> 0 and < 1")),
        (("import", faulty[_drop_a_gate], target, {}), ("missing", "model.layers.2.self_attn.lastkv_gate")),
        (
            ("import", faulty[_drop_the_key], target, {}),
            ("left over", "model.layers.0.self_attn.lastkv_gate"),
        ),
        (("import", faulty[_drop_the_key], target, {"chunk": 8}), ("left over", "lastkv_gate")),
        (("import", faulty[_widen_a_gate], target, {}), ("layers.1.self_attn.lastkv_gate", "[4]", "[2]")),
        (("import", keyed, target, {}), ("4 tensor(s) missing", "lastkv_gate")),
        (("export", edited, target, {}), ("another model", "lastkv is {'chunk_size': 8", "'chunk_size': 16")),
        (load(f"model.hf={lastkv}"), ('model.attention = "full"', config_file, '"lastkv"')),
        (load(f"model.checkpoint={ckpt}"), ('model.attention = "full"', in_ckpt, '"lastkv"')),
        (
            load(*_lastkv(f"model.hf={lastkv}", "lastkv.chunk_size=512")),
            ("lastkv.chunk_size = 512", config_file, "lastkv.chunk_size = 8"),
        ),
        (
            load(*_lastkv(f"model.checkpoint={ckpt}", "lastkv.blend=false")),
            ("lastkv.blend = false", in_ckpt, "lastkv.blend = true"),
        ),
        (load(*_lastkv(f"model.hf={lastkv}", "lastkv.gate_init=0.5")), ("accepted",)),  # for new gates only
        (load(*_lastkv(f"model.hf={keyed}")), ("4 tensor(s) missing", "lastkv_gate")),
        (load(*_lastkv(f"model.hf={faulty[_drop_the_key]}")), ("left over", "lastkv_gate")),
    ]
    cases = [(verb, str(source), str(out), options) for (verb, source, out, options), _ in expected]
    first, second = run_world(World(tp=2), f"{RANKS}:refused", cases=cases)
    assert first == second, "the ranks disagree"
    for (case, parts), message in zip(expected, first, strict=True):
        assert all(part in message for part in parts), f"{case[0]} {case[1].name} {case[3]}: {message}"
    assert not target.exists() and not incomplete_path(target).exists()


@pytest.mark.parametrize(("world", "guest"), [(ONE, FOUR), (FOUR, World(dp=2))], ids=lambda w: w.name)
def test_a_run_that_converted_on_load_saves_and_resumes_its_gates(
    world: World, guest: World, root: Path, tmp_path: Path
) -> None:
    models = {"float32": root / "qwen3-f32", "bfloat16": root / "llama-bf16-sharded-tied"}
    source = {dtype: f'hf = "{path}"\nattention = "lastkv"' for dtype, path in models.items()}
    for dtype in models:
        (tmp_path / dtype).mkdir()
    own = {dtype: tmp_path / dtype / "own" for dtype in models}

    training = "checkpoint.training_ranks"
    plain = run_world(world, f"{training}:train", cases=[(source[d], d, str(tmp_path / d)) for d in models])
    cases = [(source[dtype], dtype, str(own[dtype]), None) for dtype in models]
    again = run_world(world, f"{training}:resume", cases=cases)
    away = run_world(guest, f"{training}:resume", cases=cases)
    started = run_world(
        guest, f"{RANKS}:loaded", cases=[_lastkv(f"model.checkpoint={own[d]}", dtype=d) for d in models]
    )
    _convert(guest, [("export", own[dtype], tmp_path / f"{dtype}-hf", {}) for dtype in models])
    for index, (dtype, path) in enumerate(models.items()):
        for rank in range(world.size):
            for key, tensor in plain[rank][index]["local6"].items():
                assert _same_bits(again[rank][index]["local6"][key], tensor), f"rank {rank} {dtype} {key}"
        expected = plain[0][index]["whole3"]
        assert sum(map(_is_gate, expected)) == LAYERS
        if (
            dtype == "float32"
        ):  # bfloat16 gates may round back to where they were; their masters are in local6
            before, after = plain[0][index]["whole3"], plain[0][index]["whole4"]
            assert not any(torch.equal(before[key], after[key]) for key in expected if _is_gate(key))
        found = {
            "resumed": away[0][index]["whole3"],
            "started": started[0][index]["weights"],
            "exported": {key: tensor for key, (_, tensor) in _stored(tmp_path / f"{dtype}-hf").items()},
        }
        for how, weights in found.items():
            assert weights.keys() == expected.keys(), f"{how} {dtype}"
            assert all(_same_bits(weights[key], tensor) for key, tensor in expected.items()), f"{how} {dtype}"
        assert started[0][index]["attention"] == "lastkv C=512 blend"
        config = json.loads((path / "config.json").read_text())
        written = json.loads((tmp_path / f"{dtype}-hf" / "config.json").read_text())
        assert written == {**config, "lastkv": {"chunk_size": 512, "blend": True}}
