"""The seams of SGLang that the integration uses, in several releases: their signatures, without an import.

    python releases.py WHEEL ...        compare wheels with what was recorded, and record them

`GUARD` are the seams of the guard, `TAPE` those that only the tape needs. What was found is in
``releases.json``, by release. Before a release is supported, its wheel is compared.

Does not: run another release; equal signatures may hide another meaning.
"""

import ast
import json
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

SRT = "sglang.srt"
_RUNNER, _BACKEND = f"{SRT}.model_executor.runner", f"{SRT}.model_executor.runner_backend"
_SEGMENTS = f"{SRT}.model_executor.runner_backend_utils.breakable_cuda_graph.breakable_cuda_graph"
_ATTENTION = f"{SRT}.layers.attention.base_attn_backend.AttentionBackend"
_PLATFORM = f"{SRT}.platforms.interface.SRTPlatform"
_DRAFT = f"{SRT}.speculative.eagle_draft_cuda_graph_runner.EAGLEDraftCudaGraphRunner"
_DRAFT_EXTEND = f"{SRT}.speculative.eagle_draft_extend_cuda_graph_runner.EAGLEDraftExtendCudaGraphRunner"
_TREE = "sglang.kernels.ops.speculative.spec_tree"

GUARD = (
    f"{SRT}.plugins.load_plugins",
    f"{SRT}.plugins.hook_registry.HookRegistry.register",
    f"{SRT}.plugins.hook_registry.HookRegistry.apply_hooks",
    f"{SRT}.managers.scheduler.Scheduler.get_internal_state",
    f"{SRT}.model_executor.model_runner.ModelRunner.__init__",
    f"{SRT}.model_executor.model_runner.ModelRunner.forward",
    f"{SRT}.model_executor.model_runner.ModelRunner.init_cuda_graphs",
    f"{SRT}.model_executor.model_runner.ModelRunner._prepare_eager_forward_batch",
    f"{SRT}.model_executor.forward_batch_info.ForwardBatch.post_forward_mlp_sync_batch",
    f"{SRT}.runtime_context.get_parallel",
    f"{SRT}.runtime_context.get_spec",
    f"{_BACKEND}.full_cuda_graph_backend.FullCudaGraphBackend.capture_one",
    f"{_BACKEND}.full_cuda_graph_backend.FullCudaGraphBackend.replay",
    f"{_BACKEND}.breakable_cuda_graph_backend.BreakableCudaGraphBackend.capture_one",
    f"{_BACKEND}.breakable_cuda_graph_backend.BreakableCudaGraphBackend.replay",
    f"{_SEGMENTS}.BreakableCUDAGraphCapture._begin_new_segment",
    f"{_SEGMENTS}.BreakableCUDAGraphCapture._end_current_segment",
    f"{_RUNNER}.decode_cuda_graph_runner.DecodeCudaGraphRunner.execute",
    f"{_RUNNER}.decode_cuda_graph_runner.DecodeCudaGraphRunner.can_run_graph",
    f"{_RUNNER}.prefill_cuda_graph_runner.PrefillCudaGraphRunner.can_run_graph",
    f"{_RUNNER}.prefill_cuda_graph_runner.PrefillCudaGraphRunner.execute",
    f"{_RUNNER}.prefill_cuda_graph_runner.PrefillCudaGraphRunner.load_batch",
    f"{_RUNNER}.eager_runner.EagerRunner.execute",
    f"{_RUNNER}.shape_key.ShapeKey",
    f"{_DRAFT}.can_run_graph",
    f"{_DRAFT}.execute",
    f"{_DRAFT_EXTEND}.can_run_graph",
    f"{_DRAFT_EXTEND}.execute",
    f"{_ATTENTION}.init_forward_metadata_out_graph",
    f"{SRT}.mem_cache.memory_pool.HybridReqToTokenPool",
)
TAPE = (
    f"{SRT}.layers.moe.fused_moe_native.moe_forward_native",
    f"{_SEGMENTS}.BreakableCUDAGraphCapture",
    f"{_SEGMENTS}.BreakableCUDAGraphCapture.__init__",
    f"{SRT}.distributed.parallel_state.GroupCoordinator.all_gather_into_tensor",
    f"{SRT}.distributed.parallel_state.GroupCoordinator.all_to_all_single",
    f"{SRT}.distributed.parallel_state.GroupCoordinator.reduce_scatter_tensor",
    f"{SRT}.model_executor.forward_batch_info.ForwardBatch.prepare_mlp_sync_batch",
    f"{_PLATFORM}.get_default_attention_backend",
    f"{_PLATFORM}.get_graph_runner_cls",
    f"{_PLATFORM}.get_speculative_cache_locs_fn",
    f"{_PLATFORM}.get_speculative_graph_runner_cls",
    f"{_PLATFORM}.init_backend",
    f"{_PLATFORM}.supports_speculative_algorithm",
    f"{SRT}.platforms.cpu.CpuDeviceMixin",
    f"{SRT}.platforms.interface.PlatformCapabilities",
    f"{SRT}.arg_groups.choices.add_attention_backend_choices",
    f"{SRT}.arg_groups.overrides.declare_resolution",
    f"{SRT}.arg_groups.overrides.resolving_view",
    f"{SRT}.arg_groups.platform_hook.handle_cpu_backends",
    f"{SRT}.layers.attention.attention_registry.register_attention_backend",
    f"{SRT}.model_executor.cuda_graph_config.check_cuda_graph_backend",
    f"{SRT}.model_executor.model_runner_components.cuda_graph_setup.capture_decode_graph",
    f"{SRT}.model_executor.forward_batch_info.ForwardMode.is_cpu_graph",
    f"{SRT}.model_executor.forward_batch_info.ForwardMode.is_cuda_graph",
    f"{SRT}.runtime_context.attention_backends",
    f"{SRT}.runtime_context.get_flags",
    f"{SRT}.speculative.eagle_worker_v2.EagleDraftWorker.init_lm_head",
    f"{SRT}.speculative.draft_utils.DraftBackendFactory.create_decode_backend",
    f"{SRT}.speculative.draft_utils.DraftBackendFactory.create_draft_extend_backend",
    f"{_TREE}.build_tree_kernel_efficient_func",
    f"{_TREE}.verify_tree_greedy_func",
    f"{_TREE}.sgl_build_tree_kernel_triton",
    f"{_TREE}.verify_tree_greedy_triton",
    "sglang.kernels.ops.speculative.cache_locs.assign_extend_cache_locs",
    "sglang.kernels.ops.attention.flash_attention.flash_attn_with_kvcache",
    f"{_ATTENTION}.init_forward_metadata",
    f"{_ATTENTION}.init_forward_metadata_in_graph",
    f"{_ATTENTION}.init_cuda_graph_state",
    f"{_ATTENTION}.get_cuda_graph_seq_len_fill_value",
    f"{_ATTENTION}.forward_decode",
    f"{_ATTENTION}.forward_extend",
    f"{SRT}.mem_cache.memory_pool.KVWriteLoc.for_batch",
    f"{SRT}.mem_cache.swa_memory_pool.SWAKVPool",
)
RECORDED = Path(__file__).with_suffix(".json")

Source = Callable[[str], str | None]
"""Returns the text of a file of a release, or None if there is none."""


def of_wheel(wheel: Path) -> Source:
    """Return the source of a wheel."""
    archive = zipfile.ZipFile(wheel)
    names = {*archive.namelist()}
    return lambda path: archive.read(path).decode() if path in names else None


def of_folder(folder: Path) -> Source:
    """Return the source of an installation in ``folder``."""
    return lambda path: (folder / path).read_text("utf-8") if (folder / path).is_file() else None


def signature(source: Source, seam: str) -> str | None:
    """Return the parameters of a seam, ``class`` or ``value``; None if the release does not have it."""
    parts = seam.split(".")
    for n in range(len(parts), 0, -1):
        for file in (f"{'/'.join(parts[:n])}.py", f"{'/'.join(parts[:n])}/__init__.py"):
            text = source(file)
            if text is not None:
                return _signature(ast.parse(text), parts[n:])
    return None


def _signature(module: ast.Module, names: list[str]) -> str | None:
    at: ast.AST = module
    for name in names:
        found = [node for node in getattr(at, "body", ()) if name in _defined(node)]
        if not found:
            return None
        at = found[-1]
    if isinstance(at, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return f"({ast.unparse(at.args)})"
    return "class" if isinstance(at, ast.ClassDef) else "value"


def _defined(node: ast.AST) -> Iterator[str]:
    """Yield the names that a statement defines."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, ast.Assign):
        yield from (target.id for target in node.targets if isinstance(target, ast.Name))
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id
    elif isinstance(node, ast.ImportFrom):
        yield from (alias.asname or alias.name for alias in node.names)


def signatures(source: Source) -> dict[str, str | None]:
    """Return the signatures of all seams."""
    return {seam: signature(source, seam) for seam in (*GUARD, *TAPE)}


def recorded() -> dict[str, dict[str, str | None]]:
    """Return what was recorded, by release."""
    found: dict[str, dict[str, str | None]] = json.loads(RECORDED.read_text("utf-8"))
    return found


def main(wheels: list[str]) -> None:
    """Print how each wheel differs from the newest recorded release, and record it."""
    known = recorded() if RECORDED.exists() else {}
    for wheel in map(Path, wheels):
        release, found = wheel.name.split("-")[1], signatures(of_wheel(wheel))
        newest = known[max(known)] if known else found
        for seam, now in found.items():
            if now != newest.get(seam):
                sys.stdout.write(f"{release}: {seam}\n  recorded {newest.get(seam)}\n  there    {now}\n")
        known[release] = found
    RECORDED.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
