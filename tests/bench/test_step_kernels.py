"""What `bench step` says about the kernels of a step."""

from __future__ import annotations

import json

import pytest
import torch
from torch.profiler import ProfilerActivity

from worldsize.bench import kernels
from worldsize.bench.kernels import Kernel


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("triton_red_fused__to_copy_convolution_backward_native_batch_norm_backward_12", "compiled"),
        (
            "void at::native::batch_norm_collect_statistics_channels_last_kernel<VarReduce, float, float, 4>(...)",
            "BatchNorm",
        ),
        ("void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, int, 512, true, 1>(...)", "BatchNorm"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedSgdMathFunctor<float>>(...)", "optimizer"),
        (
            "sm80_xmma_wgrad_implicit_gemm_indexed_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x32",
            "convolutions, products",
        ),
        ("nvjet_tst_128x64_64x9_2x1_v_bz_NNT", "convolutions, products"),
        ("void cutlass__5x_cudnn::Kernel<cutlass_tensorop_bf16_s16816dgrad_optimized>(...)", "convolutions, products"),
        ("Memcpy HtoD (Pinned -> Device)", "copies, fills"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>(...)", "copies, fills"),
        ("void at::native::vectorized_elementwise_kernel<8, at::native::bfloat16_copy_kernel_cuda(...)>", "copies, fills"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(...)", kernels.OTHER),
        ("void (anonymous namespace)::max_pool_forward_nhwc<c10::BFloat16, int>(...)", kernels.OTHER),
    ],
)
def test_a_kernel_counts_as_what_its_library_calls_it(name, kind):
    assert Kernel(name, 1, 1.0).kind == kind


def test_the_table_adds_the_kernels_of_a_kind():
    found = kernels.summed([("triton_a", 1.5), ("Memset (Device)", 0.25), ("triton_b", 2.0), ("triton_a", 1.0)])
    assert found == [Kernel("triton_a", 2, 2.5), Kernel("triton_b", 1, 2.0), Kernel("Memset (Device)", 1, 0.25)]
    heading, _, row = (
        [cell.strip() for cell in line.strip("| ").split("|")] for line in kernels.table({"bare": found}).splitlines()
    )
    cells = dict(zip(heading, row, strict=True))
    assert {name: value for name, value in cells.items() if value != "0.00"} == {
        "GPU ms per step": "bare",
        "all": "4.75",
        "compiled": "4.50",
        "copies, fills": "0.25",
    }


@pytest.mark.filterwarnings("error::UserWarning")  # torch's, about events of other cycles
def test_a_step_is_profiled(tmp_path):
    """On a CPU: the same profiler, with torch's operations instead of a GPU's kernels."""
    a = torch.randn(64, 64)
    waits = []
    found = kernels.profiled(lambda: (a @ a, a @ a, None)[2], lambda: waits.append(1), ProfilerActivity.CPU)
    [product] = [kernel for kernel in found if kernel.name == "aten::mm"]
    assert product.launches == 2 and product.ms > 0 and waits == [1]
    assert [kernel.ms for kernel in found] == sorted((kernel.ms for kernel in found), reverse=True)
    kernels.write(tmp_path / "kernels.jsonl", {"bare fp32": found})
    lines = [json.loads(line) for line in (tmp_path / "kernels.jsonl").read_text().splitlines()]
    expected = {"form": "bare fp32", "kind": "other", "name": "aten::mm", "launches": 2, "ms": product.ms}
    assert len(lines) == len(found) and expected in lines
