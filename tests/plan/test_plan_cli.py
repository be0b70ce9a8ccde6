"""``hetero plan``: what it prints and writes, its refusals, and that torch stays out of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from hetero import cli, stats
from hetero.core import InputError
from hetero.model.config import load_config
from hetero.model.shapes import resolve_model, shape_names
from hetero.plan.quantised import kept_format
from hetero.plan.sizes import gib, parse_size
from hetero.rules.explain import explain, totals
from hetero.rules.load import load_rules
from hetero.rules.matching import match
from tests.plan.example import QWEN3_MOE, machine, shape

FLAGSHIP = "synthetic:qwen3.8-flash-next-125b"


def call(*args: object) -> Result:
    return CliRunner().invoke(cli.app, ["plan", *map(str, args)])


def refused(code: int, *args: object) -> str:
    result = call(*args)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return " ".join(result.output.split())


@pytest.fixture(autouse=True)
def no_measurements(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HETERO_CACHE", str(tmp_path / "cache"))


def test_shipped_shapes_are_planned_without_torch(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom hetero.cli import app\n"
        "ways = (['--hardware', 'rtx4090-7950x', '--ram', '512GiB', '--write', sys.argv[1]],\n"
        "        ['--hardware', 'cpu-epyc9354', '--ram', '2TiB', '--json'], ['--ram', '2TiB'])\n"
        f"for number, name in enumerate({shape_names()!r}):\n"
        "    app(['plan', f'synthetic:{name}', *ways[number % 3]], standalone_mode=False)\n"
        "loaded = {'torch', 'transformers', 'numpy'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "rules.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-2000:]


def test_the_text_says_what_where_and_how_fast() -> None:
    result = call(FLAGSHIP, "--hardware", "rtx4090-7950x", "--vram", "24GiB")
    assert result.exit_code == 0
    for words in (
        "fits rtx4090-7950x: ",
        "125.7 billion weights, 6.67 billion a token, and 51.2 billion of an n-gram table",
        "experts of 10 of 48 layers",
        "n-gram table",
        "experts, PCIe *",
        "bound, local routing:",
        "bound, uniform routing:",
        "expected, local routing:",
        "bound, prefill of 512 tokens:",
        "experts in int8 g32",
        "the bound needs what a run with the rules of this plan lacks:",
        "from data sheets: ",
    ):
        assert words in result.output, words


def test_json_and_files(tmp_path: Path) -> None:
    profile = tmp_path / "paper.json"
    profile.write_text(machine().model_dump_json(exclude_none=True))
    counts = tmp_path / "counts.json"
    counts.write_text(json.dumps([[1] * 128] * 48))
    result = call(
        "synthetic:qwen3-30b-a3b", "--hardware", profile, "--counts", counts, "--json", "--draft", 2
    )
    assert result.exit_code == 0, result.output
    told = json.loads(result.output)
    assert (told["kind"], told["hardware"], told["request"]["draft"]) == ("hetero-plan", "paper", 2)
    assert told["fits"]
    assert [d["routing"] for d in told["expected"]] == ["counts", "local", "uniform"]
    assert [d["routing"] for d in told["decode"]] == ["counts", "local", "uniform"]


@pytest.mark.parametrize("name", shape_names())
@pytest.mark.parametrize("hardware", ["rtx4090-7950x", "cpu-epyc9354"])
def test_written_rules_are_accepted(name: str, hardware: str, tmp_path: Path) -> None:
    import torch

    from hetero.model.build import build_meta, describe

    file = tmp_path / "rules.yaml"
    written = call(
        f"synthetic:{name}", "--hardware", hardware, "--ram", "768GiB", "--write", file, "--force", "--json"
    )
    told = json.loads(written.stdout)
    modules = describe(build_meta(load_config(shape(name)), torch.float32))
    rules = load_rules(file)
    devices = ("cpu", "cuda:0") if hardware.startswith("rtx") else ("cpu",)
    placed = match(rules, modules, devices=devices, model_type=told["model_type"])
    assert placed.notes == ()
    if told["today"]["fused"]:
        moe = [one for one in placed.assignments if one.op == "moe"]
        assert {one.op for one in placed.assignments} >= {"fused", "linear"}
        assert all(one.options["experts"]["cache"].is_auto for one in moe)
        assert all(one.options["experts"]["share"] is None for one in moe)
    assert str(rules.variables["experts"]) == told["request"]["format"]
    dtype = "bfloat16" if told["dense"] == "int8" else told["dense"]
    found = totals(explain(placed, modules, dtype))
    items = {item["name"]: item["bytes"] for tier in told["tiers"] for item in tier["items"]}
    table = items.get("n-gram table", 0)
    if devices == ("cpu",):
        assert found["cpu"] == items[f"dense layers ({dtype})"] + told["experts"]["bytes"] + table
    else:
        assert found.get("cpu", 0) + found["cuda:0"] >= told["experts"]["bytes"] + table
        assert found["cuda:0"] < told["tiers"][0]["capacity"] or not told["today"]["loads"]


def test_rules_check_takes_the_written_file(tmp_path: Path) -> None:
    file = tmp_path / "rules.yaml"
    assert call(FLAGSHIP, "--hardware", "rtx4090-7950x", "--write", file).exit_code == 0
    checked = CliRunner().invoke(cli.app, ["rules", "check", str(file), FLAGSHIP, "--devices", "cpu,cuda:0"])
    assert checked.exit_code == 0, checked.output
    assert max(map(len, file.read_text().splitlines())) <= 110
    assert "hetero run MODEL --rules THIS FILE --ctx 4096 --dtype bfloat16" in file.read_text()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--vram", "24GX"), "--vram 24GX: is no size; write 24GiB"),
        (("--vram", "24"), "--vram 24: is no size; a unit is missing"),
        (("--ram", "-3GiB"), "--ram -3GiB: is no size"),
        (("--hardware", "rtx4090"), "did you mean rtx4090-7950x"),
        (("--hardware", "no-such.json"), "neither a file nor a shipped profile"),
        (("--ctx", "-1"), "--ctx -1: must be from 1"),
        (("--format", "int5"), "unknown weight format 'int5'"),
        (("--dense", "int3"), "--dense int3: must be one of"),
        (("--counts", "no-such.json"), "--counts no-such.json: cannot be read"),
        (("--write", "/no/such/folder/rules.yaml"), "--write /no/such/folder/rules.yaml: cannot be written"),
    ],
)
def test_wrong_options(args: tuple[str, ...], message: str) -> None:
    given = args if "--hardware" in args else ("--hardware", "rtx4090-7950x", *args)
    assert message in refused(2, FLAGSHIP, *given)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("num_experts", -128, "is -128: must not be negative"),
        ("num_experts", 1e9, "must be a whole number"),
        ("num_experts", 10**9, "at most 1000000 are possible"),
        ("num_experts_per_tok", 0, "is 0: a token takes from 1 to all 8 experts"),
        ("num_experts_per_tok", 9, "is 9: a token takes from 1 to all 8 experts"),
        ("hidden_size", 0, "is 0: must be at least 1"),
        ("vocab_size", "many", "is 'many': must be a whole number"),
        ("moe_intermediate_size", 32.5, "is 32.5: must be a whole number"),
        ("num_hidden_layers", True, "is True: must be a whole number"),
    ],
)
def test_numbers_that_mean_nothing(field: str, value: object, words: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**QWEN3_MOE, field: value}))
    told = refused(2, file, "--hardware", "cpu-epyc9354")
    assert f"{file}: field '{field}' " in told
    assert words in told
    with pytest.raises(InputError, match=field):
        load_config(file)


def test_unknown_models() -> None:
    assert "did you mean" in refused(2, "synthetic:qwen3-30b", "--hardware", "rtx4090-7950x")


def test_what_does_not_fit_exits_with_3() -> None:
    told = refused(3, FLAGSHIP, "--hardware", "rtx4090-7950x", "--vram", "4GiB")
    assert "GiB of GPU memory" in told
    assert "4.0 GiB is available" in told
    told = refused(3, FLAGSHIP, "--hardware", "rtx4090-7950x", "--ram", "1GiB")
    assert "1.0 GiB is available" in told


def test_rules_that_do_not_load_are_told_first_and_exit_with_3(tmp_path: Path) -> None:
    """The bound's layout fits, and no rules that can be written do."""
    args = (FLAGSHIP, "--hardware", "rtx4090-7950x", "--vram", "10GiB", "--ram", "48GiB")
    done = call(*args)
    assert done.exit_code == 3
    first = done.output.splitlines()[0]
    assert first.startswith("does NOT fit rtx4090-7950x: ")
    assert "expected, local routing" not in done.output
    told = call(*args, "--json")
    assert told.exit_code == 3
    assert json.loads(told.stdout)["fits"] is False
    assert json.loads(told.stdout)["today"]["why_not"] is not None


def test_rules_that_do_not_load_are_not_written(tmp_path: Path) -> None:
    file = tmp_path / "rules.yaml"
    args = (FLAGSHIP, "--hardware", "rtx4090-7950x", "--vram", "10GiB", "--ram", "48GiB", "--write", file)
    done = call(*args)
    assert done.exit_code == 3
    assert not file.exists()
    assert "nothing was written, since a run with these rules does not fit; --force" in done.stderr
    forced = call(*args, "--force")
    assert forced.exit_code == 3
    assert load_rules(file).rules
    assert f"wrote {file}" in forced.stderr


def test_the_cpu_alone_is_named_where_the_gpu_is_too_small(tmp_path: Path) -> None:
    model = ("synthetic:qwen3-30b-a3b", "--hardware", "rtx4090-7950x", "--vram", "1GiB")
    told = refused(3, *model)
    assert "it fits by --vram 0, on the CPU alone: " in told
    assert "--vram 0" not in refused(3, *model, "--ram", "2GiB")
    assert call(*model[:3], "--vram", "0").exit_code == 0


def test_the_next_command_is_told(tmp_path: Path) -> None:
    model = "synthetic:qwen3-30b-a3b"
    done = call(model, "--hardware", "rtx4090-7950x", "--vram", "16GiB", "--ctx", 2048)
    last = done.stdout.splitlines()[-1]
    assert last == (
        f"next: the same with --write rules.yaml, then hetero run {model} --rules rules.yaml --ctx 2048 "
        "--vram 16384MiB --prompt-ids 1,2,3"
    )
    file = tmp_path / "my rules.yaml"
    done = call(
        model, "--hardware", "cpu-epyc9354", "--concurrency", 2, "--write", file, "--dense", "float32"
    )
    last = done.stdout.splitlines()[-1]
    assert last == f"next: hetero serve {model} --rules '{file}' --ctx 4096 --slots 2 --dtype float32"
    config = tmp_path / "config.json"
    config.write_text(json.dumps(QWEN3_MOE))
    last = call(config).stdout.splitlines()[-1]
    assert last == "next: hetero run MODEL_FOLDER --auto --ctx 4096 -p TEXT"


def test_dense_layers_are_told_as_the_run_has_them() -> None:
    """With 64 GiB layers are not fused, and modules keep bfloat16 where the bound has 8 bits."""
    done = call(FLAGSHIP, "--hardware", "rtx4090-7950x")
    assert "dense layers in bfloat16, 4096 tokens x 1" in done.stdout
    told = call("synthetic:qwen3-30b-a3b", "--hardware", "cpu-epyc9354").stdout
    assert "dense layers in bfloat16: " in told
    assert "; in float32 " in told
    assert "expected, prefill of 512 tokens: " in told


def test_another_format_is_named_where_it_decides() -> None:
    """With 64 GiB all experts fit main memory in groups of 128, and layers are fused."""
    done = call(FLAGSHIP, "--hardware", "rtx4090-7950x")
    assert "much faster by --format 'int4 g128': " in " ".join(done.output.split())
    done = call(FLAGSHIP, "--hardware", "rtx4090-7950x", "--format", "int4 g128")
    assert "much faster" not in done.output
    assert "layers fused by qwen-gpu" in " ".join(done.output.split())
    done = call(FLAGSHIP, "--hardware", "rtx4090-7950x", "--vram", "8GiB")
    assert done.exit_code == 3
    told = " ".join(done.output.split())
    assert "it fits by --format 'int4 g128': " in told
    assert "much faster" not in told


def test_the_first_line_is_the_verdict() -> None:
    done = call(FLAGSHIP, "--hardware", "rtx4090-7950x", "--ram", "128GiB")
    assert done.exit_code == 0
    head = " ".join(done.output.split())[:400]
    for words in (
        "fits rtx4090-7950x: ",
        "tokens/s expected after 4096 tokens, layers fused by qwen-gpu",
        "; a prompt of 512 tokens at ",
        "the n-gram table on disk",
    ):
        assert words in head, words


def test_counts_that_are_none(tmp_path: Path) -> None:
    none = ("[]", '[["a"]]', "[[NaN]]", "[[1e999]]", f"[[1{400 * '0'}]]")
    for text, words in (("{", "not valid JSON"), *((text, "must be a list") for text in none)):
        file = tmp_path / "counts.json"
        file.write_text(text)
        assert words in refused(2, FLAGSHIP, "--hardware", "rtx4090-7950x", "--counts", file)


def test_kept_statistics_are_taken() -> None:
    model = resolve_model("synthetic:qwen3-30b-a3b")
    used = {layer: [100.0] * 13 + [1.0] * 115 for layer in range(48)}
    stats.add(model.name, stats.config_hash(model.config), used)
    args = ("synthetic:qwen3-30b-a3b", "--hardware", "rtx4090-7950x", "--vram", "6GiB", "--json")
    told = json.loads(call(*args).output)
    assert [d["routing"] for d in told["decode"]] == ["counts", "local", "uniform"]
    assert told["decode"][0]["hit_rate"] > told["decode"][2]["hit_rate"] + 0.3


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GiB", 24 << 30),
        ("24G", 24 << 30),
        ("24GB", 24 * 10**9),
        ("24gb", 24 * 10**9),
        ("1.5TiB", 3 << 39),
        ("512 MiB", 512 << 20),
        ("77b", 77),
        ("0", 0),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text, "--x") == size


@pytest.mark.parametrize("text", ["", "GiB", "24QiB", "1e3GiB", "inf", "nan", "٣GiB", "9" * 40 + "GiB"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(InputError, match=r"--x .*is no size"):
        parse_size(text, "--x")


def test_sizes_for_people() -> None:
    assert gib(3 << 29) == "1.5 GiB"
    assert gib(1 << 20) == "1.0 MiB"


@pytest.mark.parametrize(
    ("told", "fmt"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "fbgemm_fp8"}, "fp8_row"),
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "fp8", "weight_block_size": None}, "fp8"),
        ({"quant_method": "fp8", "weight_block_size": [64, 128]}, None),
        ({"quant_method": "fp8", "weight_block_size": "odd"}, None),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, "fp8_row"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, None),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "int4 g128"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True}, "int4 g128 ordered"),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1, "desc_act": True}, "int4 g128"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "nvfp4"),
        ({"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}, "mxfp4"),
        *(
            (
                {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": weights}}},
                "fp8" if strategy != "channel" else "fp8_row",
            )
            for strategy, block in (("tensor", None), ("block", [128, 128]), ("channel", None))
            for weights in ({"type": "float", "num_bits": 8, "strategy": strategy, "block_structure": block},)
        ),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "int4z g128"),
        ({"quant_method": "gptq", "bits": 8, "group_size": 32, "sym": True}, "int8 g32"),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1, "sym": False}, "int4z g128"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, None),
        ({"quant_method": "gptq", "bits": 4, "group_size": 48}, None),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 64, "type": "int"}}},
            },
            "int4 g64",
        ),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, None),
        ({"quant_method": "bitsandbytes"}, None),
        (["nonsense"], None),
    ],
)
def test_formats_of_quantised_checkpoints(told: Any, fmt: str | None) -> None:
    found = kept_format({"quantization_config": told})
    assert (None if found is None else str(found)) == fmt


def test_a_quantised_checkpoint_keeps_its_values(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    told = {"quant_method": "awq", "bits": 4, "group_size": 128}
    config.write_text(json.dumps({**shape("qwen3-30b-a3b"), "quantization_config": told}))
    file = tmp_path / "rules.yaml"
    planned = call(config, "--hardware", "rtx4090-7950x", "--write", file, "--json")
    assert planned.exit_code == 0, planned.output
    assert json.loads(planned.stdout)["request"]["format"] == "int4z g128"
    assert load_rules(file).variables["experts"] == "keep"
    checked = CliRunner().invoke(
        cli.app, ["rules", "check", str(file), str(config), "--devices", "cpu,cuda:0"]
    )
    assert checked.exit_code == 0, checked.output
    chosen = call(config, "--hardware", "rtx4090-7950x", "--format", "int8", "--write", file, "--json")
    assert chosen.exit_code == 0
    assert load_rules(file).variables["experts"] == "int8 g32"
