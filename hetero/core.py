"""Types that every part shares. Imports neither torch nor transformers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum


class HeteroError(Exception):
    """Base of every error that is told to the user in one message, without a traceback."""

    exit_code = 1


class InputError(HeteroError):
    """The user's input is wrong: a rule, a checkpoint, an option."""

    exit_code = 2


class MachineError(HeteroError):
    """This machine cannot do what was asked: an instruction set or memory that it lacks."""

    exit_code = 3


class ActKind(StrEnum):
    """Activation of an expert, by the name that the extension knows."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    RELU = "relu"
    RELU2 = "relu2"
    IDENTITY = "identity"


@dataclass(frozen=True, slots=True)
class Activation:
    """``h = min(act(min(gate, gate_max)), act_max) * (clamp(up, -up_limit, up_limit) + up_offset)``.

    ``silu`` is ``g * sigmoid(alpha * g)``. Without a gate, ``h = act(up)``.
    """

    kind: ActKind = ActKind.SILU
    alpha: float = 1.0
    gate_max: float = math.inf
    up_limit: float = math.inf
    act_max: float = math.inf
    up_offset: float = 0.0


@dataclass(frozen=True, slots=True)
class ExpertSpec:
    """Shapes and semantics of the routed experts of one MoE block.

    An expert computes ``down(act(gate(x), up(x)))`` with gate and up of shape [intermediate, hidden] and down
    of shape [hidden, intermediate]. ``hidden`` is the width that enters the expert, which is a latent width
    in models that project before it.
    """

    num_experts: int
    hidden: int
    intermediate: int
    top_k: int
    activation: Activation = field(default_factory=Activation)
    has_gate: bool = True
    has_bias: bool = False
    # What the kernels cannot express (a foreign activation, a norm after each expert) is done in torch
    # between staged calls of the extension.
    staged: bool = False

    @property
    def params(self) -> int:
        """Weights of all experts of the block, biases left out."""
        return self.num_experts * self.intermediate * self.hidden * (3 if self.has_gate else 2)


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds and rates of one request; one clock (``time.perf_counter``)."""

    load_s: float = 0.0
    ttft_s: float = 0.0
    prefill_tok_s: float = 0.0
    decode_tok_s: float = 0.0


MOE_BLOCK = "MoeBlock"


@dataclass(frozen=True, slots=True)
class ModuleInfo:
    """One module of a model's tree, as rules see it."""

    name: str  # dotted, "" for the root
    classes: tuple[str, ...]  # its class and the bases of it, names only, most derived first
    layer: int | None  # index in the list of layers; None outside it
    params: int  # number of weights, descendants included
    own_params: int  # number of weights that the module itself holds
    # Set on the module that holds the routed experts of a MoE block. The block itself carries the extra class
    # name MOE_BLOCK, so that a rule file can name the blocks of every model type alike.
    experts: ExpertSpec | None = None
