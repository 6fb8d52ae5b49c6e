"""Architectures of GGUF files: our family of each, the names of its tensors, and the differences of its layout from transformers' files.

Names are those of llama.cpp (``gguf.constants``, ``gguf.tensor_mapping``). Its LLaMA has the rows of queries and keys in the order in which rotary
positions turn them. Its Gemma has norms that include the 1 which transformers' model adds. All matrices are (out, in), also those of GPT-2. The
matrices of all experts of a block are one tensor (experts, out, in); the first files of Mixtral have a tensor for each, which is read as well.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

_BLOCK: Final = "blk."
ROTARY_FACTORS: Final = "rope_freqs.weight"
LONG_FACTORS: Final = "rope_factors_long.weight"
SHORT_FACTORS: Final = "rope_factors_short.weight"
ALL_FACTORS: Final = (ROTARY_FACTORS, LONG_FACTORS, SHORT_FACTORS)
"""Tensors of factors that scale rotary frequencies; they are not weights."""
EMBEDDING: Final = "token_embd.weight"
HEAD: Final = "output.weight"
POSITIONS: Final = "position_embd.weight"
_ROUTER: Final = ".ffn_gate_inp.weight"
_SHARED_GATE: Final = ".ffn_gate_inp_shexp.weight"
_EXPERTS: Final = "_exps.weight"
_NUMBER: Final = re.compile(r"\.experts\.(\d+)\.")
_ALONE: Final = re.compile(r"(ffn_(?:gate|up|down))\.(\d{1,9})")
"""Short name of the matrix of one expert in the first files of Mixtral."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Names and layout of the models of one architecture.

    Args:
        name: value of general.architecture.
        model_types: our families that are written with it; a file is read as the first, unless its keys determine another.
        blocks: prefix of the names of blocks in transformers' files.
        inside: module of a block in transformers' files, with * for the number of an expert -> its name in GGUF files.
        outside: other modules.
        transposed: names of modules whose matrices are (in, out) in transformers' files.
        paired: whether rows of queries and keys are in pairs.
        norm_shift: number that GGUF files add to the weights of norms.
    """

    name: str
    model_types: tuple[str, ...]
    blocks: str = "model.layers."
    inside: Mapping[str, str]
    outside: Mapping[str, str]
    transposed: tuple[str, ...] = ()
    paired: bool = False
    norm_shift: float = 0.0
    theirs: Mapping[str, str] = field(init=False)

    def __post_init__(self) -> None:
        swapped = {short: module for names in (self.inside, self.outside) for module, short in names.items()}
        object.__setattr__(self, "theirs", swapped)

    def name_here(self, name: str) -> str | None:
        """Return the name in GGUF files of a tensor of transformers' files; None if it has none."""
        path, _, kind = name.rpartition(".")
        if path in self.outside:
            return f"{self.outside[path]}.{kind}"
        number, _, module = _NUMBER.sub(".experts.*.", path.removeprefix(self.blocks)).partition(".")
        if not path.startswith(self.blocks) or module not in self.inside:
            return None
        return f"{_BLOCK}{number}.{self.inside[module]}.{kind}"

    def name_there(self, name: str, expert: int = 0) -> str:
        """Return the name in transformers' files of a tensor of a GGUF file, or of one expert in it; the same name if it is unknown."""
        path, _, kind = name.rpartition(".")
        number, _, short = path.removeprefix(_BLOCK).partition(".")
        if alone := _ALONE.fullmatch(short):
            short, expert = f"{alone[1]}_exps", int(alone[2])
        if path.startswith(_BLOCK) and short in self.theirs:
            return f"{self.blocks}{number}.{self.theirs[short].replace('*', str(expert))}.{kind}"
        return f"{self.theirs[path]}.{kind}" if path in self.theirs else name

    @staticmethod
    def expert_of(name: str) -> int:
        """Return the number of the expert that a name in transformers' files has; 0 if it has none."""
        match = _NUMBER.search(name)
        return 0 if match is None else int(match[1])

    @staticmethod
    def is_of_one_expert(name: str, layer: str) -> bool:
        """Return whether the tensor with this name in GGUF files is the matrix of one expert, in `layer`: "ffn_gate", "ffn_up" or "ffn_down"."""
        alone = _ALONE.fullmatch(name.removesuffix(".weight").removeprefix(_BLOCK).partition(".")[2])
        return alone is not None and alone[1] == layer

    @staticmethod
    def has_experts(name: str) -> bool:
        """Return whether the tensor with this name in GGUF files has the matrices of all experts of a block."""
        return name.endswith(_EXPERTS)

    @staticmethod
    def is_row(name: str) -> bool:
        """Return whether the vector with this name in GGUF files is a matrix of one row in transformers' files."""
        return name.endswith(_SHARED_GATE)

    @staticmethod
    def is_router(name: str) -> bool:
        """Return whether the tensor with this name in GGUF files chooses or weighs experts, and llama.cpp keeps it in F32."""
        return name.endswith((_ROUTER, _SHARED_GATE))

    def is_transposed(self, name: str) -> bool:
        """Return whether the matrix with this name in GGUF files is (in, out) in transformers' files."""
        return name.endswith(tuple(f".{short}.weight" for short in self.transposed))

    def is_paired(self, name: str) -> bool:
        """Return whether the rows of the matrix with this name in GGUF files are in pairs."""
        return self.paired and name.rpartition(".")[0].endswith((".attn_q", ".attn_k"))

    def shift(self, name: str) -> float:
        """Return the number that GGUF files add to the values of the tensor with this name there."""
        return self.norm_shift if name.endswith("norm.weight") else 0.0


_OUTSIDE: Final = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_INSIDE: Final = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_HEAD_NORMS: Final = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
_NORMS_AROUND: Final = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_ATTENTION: Final = {module: short for module, short in _INSIDE.items() if not module.startswith("mlp.")}


def _mixture(router: str, experts: str, gate: str, up: str, down: str) -> dict[str, str]:
    """Return the names of a router, and of the matrices of experts."""
    return {router: "ffn_gate_inp", **{f"{experts}.*.{name}": f"ffn_{kind}_exps" for name, kind in ((gate, "gate"), (up, "up"), (down, "down"))}}


_MIXTURE: Final = _mixture("mlp.gate", "mlp.experts", "gate_proj", "up_proj", "down_proj")
_SHARED: Final = {"mlp.shared_expert_gate": "ffn_gate_inp_shexp"} | {
    f"mlp.shared_expert.{kind}_proj": f"ffn_{kind}_shexp" for kind in ("gate", "up", "down")
}
_LLAMA: Final = Architecture(
    name="llama",
    model_types=("llama", "mistral", "mixtral"),
    inside={**_INSIDE, **_mixture("block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2")},
    outside=_OUTSIDE,
    paired=True,
)

_ALL: Final = (
    Architecture(
        name="gpt2",
        model_types=("gpt2",),
        blocks="transformer.h.",
        inside={
            "ln_1": "attn_norm",
            "attn.c_attn": "attn_qkv",
            "attn.c_proj": "attn_output",
            "ln_2": "ffn_norm",
            "mlp.c_fc": "ffn_up",
            "mlp.c_proj": "ffn_down",
        },
        outside={"transformer.wte": "token_embd", "transformer.wpe": "position_embd", "transformer.ln_f": "output_norm", "lm_head": "output"},
        transposed=("attn_qkv", "attn_output", "ffn_up", "ffn_down"),
    ),
    _LLAMA,
    replace(_LLAMA, name="olmoe", model_types=("olmoe",), paired=False, inside={**_ATTENTION, **_HEAD_NORMS, **_MIXTURE}),
    replace(_LLAMA, name="qwen2", model_types=("qwen2",), paired=False, inside=_INSIDE),
    replace(_LLAMA, name="qwen2moe", model_types=("qwen2_moe",), paired=False, inside={**_ATTENTION, **_MIXTURE, **_SHARED}),
    replace(_LLAMA, name="qwen3", model_types=("qwen3",), paired=False, inside={**_INSIDE, **_HEAD_NORMS}),
    replace(_LLAMA, name="qwen3moe", model_types=("qwen3_moe",), paired=False, inside={**_ATTENTION, **_HEAD_NORMS, **_MIXTURE}),
    replace(
        _LLAMA,
        name="gemma2",
        model_types=("gemma2",),
        paired=False,
        norm_shift=1.0,
        inside={**_INSIDE, **_NORMS_AROUND},
        outside={"model.embed_tokens": "token_embd", "model.norm": "output_norm"},  # the head is the embedding
    ),
    replace(
        _LLAMA,
        name="gemma3",
        model_types=("gemma3_text",),
        paired=False,
        norm_shift=1.0,
        inside={**_INSIDE, **_HEAD_NORMS, **_NORMS_AROUND},
    ),
    replace(
        _LLAMA,
        name="phi3",
        model_types=("phi3",),
        paired=False,
        inside={
            "input_layernorm": "attn_norm",
            "self_attn.qkv_proj": "attn_qkv",
            "self_attn.o_proj": "attn_output",
            "post_attention_layernorm": "ffn_norm",
            "mlp.gate_up_proj": "ffn_up",
            "mlp.down_proj": "ffn_down",
        },
    ),
    replace(
        _LLAMA,
        name="phi2",
        model_types=("phi",),
        paired=False,
        inside={
            "input_layernorm": "attn_norm",
            "self_attn.q_proj": "attn_q",
            "self_attn.k_proj": "attn_k",
            "self_attn.v_proj": "attn_v",
            "self_attn.dense": "attn_output",
            "mlp.fc1": "ffn_up",
            "mlp.fc2": "ffn_down",
        },
        outside={"model.embed_tokens": "token_embd", "model.final_layernorm": "output_norm", "lm_head": "output"},
    ),
)
ARCHITECTURES: Final[Mapping[str, Architecture]] = {each.name: each for each in _ALL}
"""general.architecture -> architecture."""


def architecture_for(model_type: str) -> Architecture | None:
    """Return the architecture of models of a family; None if GGUF has none."""
    return next((each for each in _ALL if model_type in each.model_types), None)
