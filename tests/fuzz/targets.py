"""What is fuzzed: readers of files that come from strangers. Each takes bytes and writes them to ``path``.

Whatever the bytes are, a reader returns or raises InputError, within a second and a few times the file's
size. Anything else is a finding: its bytes go to ``corpus/TARGET/`` and are read in every test run.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from hetero.core import InputError

Target = Callable[[bytes, Path], object]


def gguf(data: bytes, path: Path) -> object:
    from hetero.model.gguf_file import scan

    path.write_bytes(data)
    return scan(path)


def gguf_model(data: bytes, path: Path) -> object:
    """A GGUF file as a model: configuration, tokenizer, and what its tensors are."""
    from hetero.model.config import load_config
    from hetero.model.shapes import resolve_model
    from hetero.model.sources import open_source
    from hetero.model.tokenizer import load_tokenizer

    path.write_bytes(data)
    load_config(resolve_model(str(path)).config)
    load_tokenizer(path)
    with open_source(path) as source:
        return source.tensors


def manifest(data: bytes, path: Path) -> object:
    """The manifest of a file of packed experts, which is unusable rather than an error when it is broken."""
    from hetero.store.manifest import Manifest

    try:
        return Manifest.from_json(data)
    except ValueError:
        return None


def hardware(data: bytes, path: Path) -> object:
    """A hardware profile for plans."""
    from hetero.plan.hardware import load_hardware

    path.write_bytes(data)
    return load_hardware(str(path))


def safetensors(data: bytes, path: Path) -> object:
    """The bytes as they are, and as the header of a file that has room for tensors."""
    from hetero.model.source import read_header

    path.write_bytes(data)
    try:
        read_header(path)
    except InputError:
        path.write_bytes(len(data).to_bytes(8, "little") + data + bytes(64))
        return read_header(path)
    return None


def index(data: bytes, path: Path) -> object:
    """A folder with a model.safetensors.index.json."""
    from hetero.model.source import INDEX, Checkpoint

    path.mkdir(exist_ok=True)
    (path / INDEX).write_bytes(data)
    return Checkpoint(path).close()


def config(data: bytes, path: Path) -> object:
    """A config.json, as far as the class of its model type."""
    from hetero.model.config import load_config
    from hetero.model.shapes import read_config

    path.write_bytes(data)
    return load_config(read_config(path))


def generation(data: bytes, path: Path) -> object:
    """A generation_config.json."""
    from types import SimpleNamespace

    from hetero.engine.load import eos_ids

    path.mkdir(exist_ok=True)
    (path / "generation_config.json").write_bytes(data)
    return eos_ids(path, SimpleNamespace(eos_token_id=1), None)


def statistics(data: bytes, path: Path) -> object:
    """A file of statistics, which is nothing rather than an error when it is broken."""
    from hetero import stats

    path.write_bytes(data)
    found = stats._read(path)
    return None if found is None else found.array()


TARGETS: dict[str, Target] = {
    "gguf": gguf,
    "gguf_model": gguf_model,
    "safetensors": safetensors,
    "index": index,
    "config": config,
    "generation": generation,
    "statistics": statistics,
    "manifest": manifest,
    "hardware": hardware,
}


def run(target: Target, data: bytes, path: Path) -> None:
    """Raises whatever is a finding."""
    try:
        target(data, path)
    except InputError as error:
        # Told to a person: there is a sentence, and it can be printed.
        if not str(error).strip():
            raise ValueError("an error without a message") from error
        str(error).encode("utf-8", "backslashreplace")


def seeds(name: str, folder: Path) -> list[bytes]:
    """Inputs to begin with, written in ``folder``: files that are right, from which a fuzzer goes astray."""
    if name == "gguf":
        return _gguf_seeds(folder)
    if name == "gguf_model":
        return [_gguf_model(folder / "seed-model.gguf"), _gguf_by_layer(folder / "seed-layers.gguf")]
    if name == "manifest":
        return [_manifest()]
    if name == "hardware":
        return [file.read_bytes() for file in sorted(_HARDWARE.glob("*.json"))[:2]]
    texts = {
        "safetensors": [
            {"a": {"dtype": "F32", "shape": [2, 8], "data_offsets": [0, 64]}},
            {
                "a": {"dtype": "BF16", "shape": [16], "data_offsets": [0, 32]},
                "b": {"dtype": "F8_E4M3", "shape": [4, 8], "data_offsets": [32, 64]},
                "__metadata__": {"format": "pt"},
            },
        ],
        "index": [
            {"metadata": {"total_size": 64}, "weight_map": {"a.weight": "model-00001-of-00002.safetensors"}}
        ],
        "config": [
            {"model_type": "qwen3_moe", **_SHAPE, "num_experts": 8, "moe_intermediate_size": 24},
            {
                "model_type": "mixtral",
                **_SHAPE,
                "num_local_experts": 8,
                "rope_scaling": {"type": "yarn", "factor": 2.0},
            },
            {
                "model_type": "qwen3_5_moe",
                "text_config": _SHAPE,
                "vision_config": {},
                "quantization_config": {},
            },
        ],
        "generation": [{"eos_token_id": [1, 2]}, {"eos_token_id": 2, "temperature": 0.6}],
        "statistics": [
            {"version": 1, "name": "m", "config": "c", "choices": 3, "layers": {"0": [1, 2], "3": [0.5, 0]}}
        ],
    }
    return [json.dumps(text).encode() for text in texts[name]]


_HARDWARE = Path(__file__).parents[2] / "hetero" / "data" / "hardware"
_SHAPE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "layer_types": ["full_attention", "sliding_attention"],
}


def _gguf_model(path: Path) -> bytes:
    """A model of one layer, whose file is small enough to be changed byte by byte."""
    from gguf import GGUFWriter

    from tests.model import hf_to_gguf
    from tests.model.tiny import tiny

    small = {"vocab_size": 12, "hidden_size": 8, "intermediate_size": 8, "moe_intermediate_size": 4}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "num_experts": 2}
    model = tiny("qwen3_moe", **small, **heads, num_hidden_layers=1)

    def tokenizer(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("qwen2")
        writer.add_token_list(["<s>", "</s>", *"abcdefgh", "ab", "cd"])
        writer.add_token_types([3, 3, *[1] * 10])
        writer.add_token_merges(["a b", "c d"])
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(1)
        writer.add_chat_template("{{ messages }}")

    hf_to_gguf.write(model, path, "qwen3moe", more=tokenizer)
    return path.read_bytes()


def _gguf_by_layer(path: Path) -> bytes:
    """A model whose metadata have numbers of each layer, and whose tokenizer has a list of merges."""
    from gguf import GGUFWriter

    from hetero.model.build import choose_class
    from tests.model import hf_to_gguf
    from tests.model.tiny_moe import tiny_config, tiny_model

    small = {"vocab_size": 12, "vocab_size_per_layer_input": 12, "hidden_size": 8, "intermediate_size": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 4, "global_head_dim": 8}
    experts = {"num_experts": 2, "top_k_experts": 1, "moe_intermediate_size": 4}
    layers = {"num_hidden_layers": 2, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
    kinds = ["sliding_attention", "full_attention"]
    config = tiny_config("gemma4_text", **small, **heads, **experts, **layers, layer_types=kinds)
    chosen = choose_class(config)

    def tokenizer(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("gemma4")
        writer.add_token_list(["<bos>", "<eos>", *"abcdefgh", "ab", "cd"])
        writer.add_token_types([3, 3, *[1] * 10])
        writer.add_token_merges(["a b", "c d"])
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(1)

    hf_to_gguf.write(tiny_model(chosen.cls, chosen.config, seed=1), path, "gemma4", more=tokenizer)
    return path.read_bytes()


def _manifest() -> bytes:
    from hetero.store.manifest import Block, Manifest, SourceIdentity

    block = Block("model.layers.0.mlp", 8, 32, 24, True, False, ("int8", "int8"), 4096)
    return Manifest(SourceIdentity((("a.safetensors", 64, 5),), "abc"), (block,), 1).to_json()


def _gguf_seeds(folder: Path) -> list[bytes]:
    import numpy as np
    from gguf import GGMLQuantizationType, GGUFWriter

    made = []
    for number, alignment in enumerate((32, 64)):
        path = folder / f"seed-{number}.gguf"
        writer = GGUFWriter(path, "qwen3moe")
        writer.add_custom_alignment(alignment)
        writer.add_block_count(2)
        writer.add_float32("qwen3moe.rope.freq_base", 1e6)
        writer.add_bool("tokenizer.ggml.add_bos_token", True)
        writer.add_array("tokenizer.ggml.tokens", ["a", "b", "<s>"])
        writer.add_array("tokenizer.ggml.token_type", [1, 1, 3])
        writer.add_string("tokenizer.chat_template", "{{ messages }}")
        if number:
            writer.add_uint16("split.count", 2)
            writer.add_uint16("split.no", 0)
            writer.add_int32("split.tensors.count", 2)
        writer.add_tensor("token_embd.weight", np.zeros((3, 8), np.float32))
        blocks = np.zeros((2, 34), np.uint8)
        writer.add_tensor("blk.0.ffn_up.weight", blocks, raw_dtype=GGMLQuantizationType.Q8_0)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        made.append(path.read_bytes())
    return made
