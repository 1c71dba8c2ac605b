"""How the modules of a model are cut for tensor and expert parallelism: a table by family and module name. Pure.

Guarantee: a model is cut only by a plan that names each of its parameters and whose sizes it has; anything else is
refused, by name. Sharding, copies and context parallelism need no plan.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Literal

from sandbox.errors import Invalid
from trainer.distributed.mesh import MeshLayout

Cut = Literal["columns", "rows", "vocabulary", "heads", "latent", "experts", "complete"]
"""How a module is cut:

columns     a matrix by its outputs: heads of attention, the inner width
rows        a matrix by its inputs; its outputs are summed over ranks
vocabulary  an embedding or a head by tokens
heads       a norm of single heads: complete, its gradient is a sum over ranks
latent      complete; each rank's heads give a part of the gradient of the rotary key, which all heads share
experts     by whole experts
complete    the same on every rank
"""
ModelPlan = Mapping[str, Cut]  # patterns of module names, below the list of layers or outside of it

OUTER: ModelPlan = {r"embed_tokens": "vocabulary", r"lm_head": "vocabulary", r"norm": "complete"}
NORMS: ModelPlan = {r"(input|post_attention)_layernorm": "complete"}
ATTENTION: ModelPlan = {r"self_attn\.[qkv]_proj": "columns", r"self_attn\.o_proj": "rows"}
HEAD_NORMS: ModelPlan = {r"self_attn\.[qk]_norm": "heads"}
LATENT: ModelPlan = {
    r"self_attn\.(q_proj|q_b_proj|kv_b_proj)": "columns",
    r"self_attn\.(q_a_proj|q_a_layernorm|kv_a_layernorm)": "complete",
    r"self_attn\.kv_a_proj_with_mqa": "latent",
    r"self_attn\.o_proj": "rows",
}
MLP: ModelPlan = {r"mlp\.(gate|up)_proj": "columns", r"mlp\.down_proj": "rows"}
EXPERTS: ModelPlan = {r"mlp\.experts": "experts", r"mlp\.gate": "complete"}
SHARED_EXPERTS: ModelPlan = {
    r"mlp\.shared_experts\.(gate|up)_proj": "columns",
    r"mlp\.shared_experts\.down_proj": "rows",
}
DENSE: ModelPlan = {**OUTER, **NORMS, **ATTENTION, **MLP}

PLANS: dict[str, ModelPlan] = {  # by `model_type` of config.json
    "llama": DENSE,
    "mistral": DENSE,
    "qwen2": DENSE,
    "qwen3": {**DENSE, **HEAD_NORMS},
    "qwen3_moe": {**DENSE, **HEAD_NORMS, **EXPERTS},
    "deepseek_v3": {**OUTER, **NORMS, **LATENT, **MLP, **EXPERTS, **SHARED_EXPERTS},
}
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")  # in config.json, as versions write it
LAYER = re.compile(r"^(?:model\.)?(?:layers\.\d+\.)?")


def plan_of(kind: str) -> ModelPlan:
    """By the `model_type` of a model. Raises Invalid where there is none."""
    if kind not in PLANS:
        raise Invalid(
            f"no plan cuts models of type {kind}",
            hint=f"leave out mesh.tensor and mesh.expert, or train one of: {', '.join(sorted(PLANS))}",
        )
    return PLANS[kind]


def need_cuttable(content: Mapping[str, object], layout: MeshLayout, *, adapters: bool = False) -> None:
    """Refuses a model, by its ``config.json``, that cannot be cut so, and one with adapters."""
    if not layout.cuts:
        return
    if adapters:
        raise Invalid("adapters are not cut", hint="leave out mesh.tensor and mesh.expert, or lora")
    kind = str(content.get("model_type"))
    plan = plan_of(kind)
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        size = content.get(name)
        if isinstance(size, int) and size % layout.tensor:
            raise Invalid(f"{name} is {size}, mesh.tensor {layout.tensor}", hint="set mesh.tensor to a divisor")
    if int(str(content.get("vocab_size", 0))) < layout.tensor**2:
        raise Invalid("the vocabulary is too small for mesh.tensor", hint="leave out mesh.tensor")
    if layout.expert == 1:
        return
    count = next((content[name] for name in EXPERT_COUNTS if name in content), None)
    if "experts" not in plan.values() or not isinstance(count, int):
        raise Invalid(f"a {kind} has no experts", hint="leave out mesh.expert")
    if count % layout.expert:
        raise Invalid(f"there are {count} experts, mesh.expert is {layout.expert}", hint="set mesh.expert to a divisor")


def cuts(plan: ModelPlan, parameters: Iterable[str]) -> dict[str, Cut]:
    """Of each module that has parameters, by its name. Raises Invalid, naming those of which the plan says nothing.

    Example: ``cuts(DENSE, ["model.layers.0.mlp.up_proj.weight"]) == {"model.layers.0.mlp.up_proj": "columns"}``
    """
    result: dict[str, Cut] = {}
    unnamed = []
    for name in parameters:
        module = name.rpartition(".")[0]
        local = LAYER.sub("", module)
        cut = next((cut for pattern, cut in plan.items() if re.fullmatch(pattern, local)), None)
        if cut is None:
            unnamed.append(name)
        else:
            result[module] = cut
    if unnamed:
        raise Invalid(
            f"the plan for this type of model does not name {', '.join(unnamed[:3])}",
            hint="leave out mesh.tensor and mesh.expert",
        )
    return result
