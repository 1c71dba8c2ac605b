"""Bytes on each GPU, by what they are for. Pure.

Guarantee: weights, gradients, optimiser and caches are exact; activations are what autograd retains for a dense Qwen3
here, counted tensor by tensor (`trainer.estimate.retained` gives the same), and nearly that for a mixture of experts.
Not counted: what CUDA and NCCL take, and what an allocator loses.
"""

from __future__ import annotations

from coordinator.simulate.scale.plan import PoolLayout, ScalePlan
from coordinator.simulate.scale.shapes import BF16, CHUNK, FP32, ModelShape

GIB = 1 << 30


def retained(shape: ModelShape, tokens: int, sampled: int, *, bf16: bool, recompute: bool) -> float:
    """Activations of a micro-batch that autograd retains between forward and backward pass."""
    logits = FP32 * sampled * shape.vocabulary
    ends = tokens * ((10 if bf16 else 12) * shape.hidden + 28) + (BF16 * shape.embedding if bf16 else 0)
    ends += logits if sampled * shape.vocabulary <= CHUNK else 0
    if recompute:
        return tokens * shape.layers * FP32 * shape.hidden + ends
    return shape.layers * in_layer(shape, tokens, bf16=bf16) + ends


def in_layer(shape: ModelShape, tokens: float, *, bf16: bool) -> float:
    """Activations of one layer. In half precision its weights are rounded, and that copy is retained as well."""
    width, inner = shape.hidden, max(1, shape.experts_per_token) * (shape.expert_intermediate or shape.intermediate)
    copies = 2 * BF16 * width * shape.experts_per_token  # what goes to the experts, and comes from them
    if not bf16:
        per_token = 24 * width + 16 * inner + shape.heads * (20 * shape.head_dim + 8)
        return tokens * (per_token + shape.kv_heads * (16 * shape.head_dim + 4) + 8 + 2 * copies)
    per_token = 26 * width + 8 * inner + shape.heads * (14 * shape.head_dim + 8)
    per_token += shape.kv_heads * (12 * shape.head_dim + 4) + 8 + copies
    return tokens * per_token + BF16 * (shape.attention + max(1, shape.experts) * shape.expert)


def layer_of_rank(plan: ScalePlan) -> float:
    """Weights of a layer that a rank has complete while it computes it."""
    shape, layout = plan.shape, plan.trainer
    experts = shape.experts * shape.expert
    gathered = experts / layout.expert if 1 < layout.expert < plan.ranks else 0 if layout.expert > 1 else experts
    return (shape.layer - experts + gathered) / layout.tensor


def of_trainer(plan: ScalePlan, sampled: float) -> dict[str, float]:
    """Of each of its GPUs. `sampled`: share of the tokens that the policy sampled."""
    shape, layout = plan.shape, plan.trainer
    own, outside = shape.parameters / layout.gpus, shape.outside / layout.tensor
    shared = plan.ranks > 1
    tokens = layout.micro_batch
    one = in_layer(shape, tokens, bf16=layout.bf16) if layout.recompute else 0.0
    activations = retained(shape, tokens, int(tokens * sampled), bf16=layout.bf16, recompute=layout.recompute)
    return {
        "weights": layout.weight_bytes * own,
        "gradients": layout.gradient_bytes * (own + (layer_of_rank(plan) + outside if shared else 0)),
        "optimiser": layout.optimiser_bytes * own,
        "gathered weights": layout.gathered_bytes * (2 * layer_of_rank(plan) + outside) if shared else 0.0,
        "published version": BF16 * own if plan.publication.ranks else 0.0,
        "activations": activations / layout.tensor + one / layout.tensor,
        "logits": 3.0 * FP32 * CHUNK,
    }


def of_engine(plan: ScalePlan, pool: PoolLayout) -> dict[str, float]:
    """Of each of its GPUs; the cache is what is left."""
    limit = pool.reserved * plan.gpu(pool.gpu).memory * GIB
    weights, working = BF16 * plan.shape.parameters / pool.tensor, pool.working_gib * GIB
    return {"weights": weights, "working": working, "cache": max(0.0, limit - weights - working)}


def cache_tokens(plan: ScalePlan, pool: PoolLayout) -> float:
    """Tokens whose keys and values an engine can hold."""
    return of_engine(plan, pool)["cache"] / plan.shape.cache_bytes(pool.tensor)
