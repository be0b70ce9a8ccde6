"""Where a model over several devices changes device. The devices are names here; tests/gpu has real ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hetero.core import InputError
from hetero.ops import hops
from hetero.rules.placement import Assignment, Placement
from hetero.rules.schema import Rule


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Linear(2, 2)
        self.mlp = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, *, also: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        return self.mlp(self.attention(x)) + also, {"also": also}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 2)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(2, 4)

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding


def placement(model: nn.Module, rule: Rule, **devices: str) -> Placement:
    """Every module without children on "cpu" unless a prefix of its name says otherwise ("__" for a dot)."""
    names = [name for name, module in model.named_modules() if not list(module.children())]
    names += [key.replace("__", ".") for key in devices]

    def device(name: str) -> str:
        found = [key for key in devices if name.startswith(key.replace("__", "."))]
        return devices[max(found, key=len)] if found else "cpu"

    assignments = tuple(Assignment(name, rule, "keep", None, device(name)) for name in dict.fromkeys(names))
    return Placement(ruleset=None, assignments=assignments)  # type: ignore[arg-type]


@pytest.fixture
def rule() -> Any:
    class Named:
        label = "rules.yaml:3: rule 'here'"

    return Named()


def test_one_device_needs_no_hop(rule: Rule) -> None:
    model = Model()
    assert hops.connect(model, placement(model, rule)) == []


def test_hops_stand_at_the_largest_modules_of_one_device(rule: Rule) -> None:
    model = Model()
    found = hops.connect(model, placement(model, rule, layers__0="meta"))
    assert found == ["embedding", "layers.0", "layers.1", "head"]


def test_a_layer_over_two_devices_hops_inside(rule: Rule) -> None:
    model = Model()
    found = hops.connect(model, placement(model, rule, layers__1__mlp="meta"))
    assert found == ["embedding", "layers.0", "layers.1.attention", "layers.1.mlp", "head"]


def test_inputs_come_and_outputs_return(rule: Rule) -> None:
    """Positional and named tensors are brought to the module's device, nested outputs back to the inputs'."""
    seen = {}
    model = Model()
    hops.connect(model, placement(model, rule, layers__0="meta"))
    layer = model.layers[0].to("meta")
    layer.attention.register_forward_pre_hook(lambda _, args: seen.update(device=args[0].device.type))
    x = torch.ones(1, 2, device="meta")
    out, more = layer(x, also=torch.ones(1, 2))
    assert seen == {"device": "meta"}
    assert (out.device.type, more["also"].device.type) == ("meta", "meta")
    out, _ = model.layers[1](torch.ones(1, 2), also=torch.ones(1, 2))
    assert out.device.type == "cpu"


def test_weights_of_a_spread_module_must_be_at_home(rule: Rule) -> None:
    model = Model()
    model.layers[0].scale = nn.Parameter(torch.ones(1))
    spread = placement(model, rule, layers__0="meta", layers__0__mlp="cpu")
    with pytest.raises(InputError, match=r"layers\.0 has weights of its own \(scale\) on meta"):
        hops.connect(model, spread)
