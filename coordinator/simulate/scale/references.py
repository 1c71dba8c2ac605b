"""Published figures that plans can name: GPUs, models, and the shares of their peaks that are reached.

Pure. Guarantee: each row says where its figures come from, and every plan that uses one prints that.
"""

from __future__ import annotations

import msgspec

from coordinator.simulate.scale.shapes import ModelShape
from rollout.decide.ranges import Fraction, Positive

INFERSIM = "alibaba/InferSim, hardware/gpu.py (github.com)"
QWEN = "its config.json on huggingface.co, and the table of arXiv:2505.09388"


class GpuKind(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One GPU in a machine of eight. Links count one direction."""

    flops: Positive  # dense, in bf16, a second
    memory: Positive  # GiB
    bandwidth: Positive  # bytes per second of its memory
    nvlink: Positive  # bytes per second to others of its machine
    nic: Positive  # bytes per second to other machines
    per_machine: Positive = 8
    reached: Fraction = 0.8  # share of each bandwidth that programs reach
    prefill: Fraction = 0.5  # share of the FLOP that reading prompts reaches
    source: str = "the plan"


GPUS = {
    "H800": GpuKind(
        flops=989e12, memory=80, bandwidth=3430e9, nvlink=200e9, nic=50e9, prefill=0.35,
        source=f"{INFERSIM}: 989 TFLOPS, 80 GB, 3,430 GB/s, NVLink 400 GB/s both ways, RDMA 50 GB/s each, "
        "of bandwidths 80 %, prefill 35 %",
    ),
    "H20": GpuKind(
        flops=148e12, memory=96, bandwidth=4096e9, nvlink=450e9, nic=50e9, prefill=0.6,
        source=f"{INFERSIM}: 148 TFLOPS, 96 GB, 4,096 GB/s, NVLink 900 GB/s both ways, RDMA 50 GB/s each, "
        "of bandwidths 80 %, prefill 60 %",
    ),
}  # fmt: skip

MODELS = {
    "Qwen3-32B": ModelShape(
        layers=64, hidden=5120, heads=64, kv_heads=8, head_dim=128, intermediate=25_600, vocabulary=151_936,
        source=QWEN,
    ),
    "Qwen3-235B-A22B": ModelShape(
        layers=94, hidden=4096, heads=64, kv_heads=4, head_dim=128, vocabulary=151_936,
        experts=128, experts_per_token=8, expert_intermediate=1536, source=QWEN,
    ),
}  # fmt: skip

DENSE = (0.47, "Megatron-LM's README: up to 47 % of the FLOP of H100 clusters")
MIXTURE = (0.30, "NVIDIA's Megatron-Bridge, MoE hardware configurations: Qwen3 235B on H100 around 30 %")
CHANGED = (0.0069, "docs/benchmarks.md, Weights: AdamW at 1e-6 changes 0.69 % of the bf16 values of SmolLM2-135M")
CHANGE = (2.75, "docs/benchmarks.md, Weights: 0.95 % of all bytes for 0.69 % of the values")
IMAGE = (1.37, "docs/benchmarks.md, Weights: the full image of SmolLM2-135M's 134.5 million values has 184 MB")
ENCODED = (0.734e9, "docs/benchmarks.md, Weights: one core compares, encodes and hashes 734 MB of weights a second")
PULLED = (2.27e9, "docs/benchmarks.md, Weights: one process fetches, writes and checks 270 MB of weights in 119 ms")
RESERVED = (0.9, "gpu_memory_utilization of vLLM: 0.9 unless it is set")
BETWEEN = (25e9, "assumed: one line of 200 Gbit/s between the clusters")
DISK = (5e9, "assumed: 5 GB a second and machine")
LATENCY = (1e-5, "assumed: 10 us for each collective of a decoding step")
