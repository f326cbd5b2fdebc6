"""Causes on accelerators that are not NVIDIA's, and arithmetic exceptions of native code."""

from ddp_doctor.explain.events import Cause, Fix

_NONE = "needs such a device; composed from the text of its software"

CAUSES = (
    Cause(
        code="accelerator-collectives",
        title="the device's own library of collectives failed",
        phrases=(
            r"oneCCL: (?P<what>.+)",
            r"\|CCL_ERROR\| (?P<what>.+)",
            r"HCCL (?:function )?error in",
            r"(?P<what>\w+) isn't implemented on backend \[\w+\]",
            r"what\(\): +Collective call returned error",
        ),
        is_generic=True,
        why="oneCCL (Intel), HCCL (Ascend, Gaudi) could not start or finish a collective: its "
        "build does not fit torch, it finds no network provider, or processes of an earlier job "
        "still hold the devices",
        fix=Fix(
            plain="The versions of torch and of the vendor's plug-in belong together; end "
            "processes that are left over; oneCCL: start with mpirun, or set FI_PROVIDER=tcp and "
            "FI_PROVIDER_PATH; HCCL: wait 10 s after an earlier job.",
        ),
        confirm="Its debug log: CCL_LOG_LEVEL=info, ASCEND_GLOBAL_LOG_LEVEL=1, "
        "LOG_LEVEL_ALL_HCL=1.",
        source="oneCCL src/atl, torch_npu ProcessGroupHCCL.cpp, process_group_hccl_base.cpp",
        no_test=_NONE,
    ),
    Cause(
        code="accelerator-gaudi",
        title="Gaudi's graph compiler or runtime failed",
        phrases=(
            r"synNodeCreateWithId failed (?P<what>.+)",
            r"synStatus[ =](?P<what>.+)",
        ),
        why="An operation of the model can't be compiled or run on this device in this version: "
        "an unsupported type or shape, or no memory",
        fix=Fix(
            plain="The versions of SynapseAI, its torch and optimum-habana belong together "
            "(hl-smi prints the driver's); PT_HPU_LAZY_MODE=1, static shapes, a smaller batch.",
        ),
        confirm="The operation in the message fails in one process, too.",
        source="Habana's SynapseAI",
        no_test=_NONE,
    ),
    Cause(
        code="killed-sigfpe",
        title="a process ended by an arithmetic exception in native code (SIGFPE)",
        phrases=(
            r"Signal 8 \(SIGFPE\) received by PID (?P<pid>\d+)",
            r"Fatal Python error: Floating point exception",
            r"Floating point exception(?: +\(core dumped\)|$)",
            r"(?:terminated with signal |died with <Signals\.|\*\*\* )SIGFPE",
            r"exits with return code = -8",
        ),
        is_generic=True,
        why="An integer division by zero in a library: cuBLAS before 12.4.5.8 on H20 and other "
        "new GPUs, or an extension that was given an empty tensor",
        fix=Fix(
            plain="pip install -U nvidia-cublas-cu12, or a newer torch; PYTHONFAULTHANDLER=1 "
            "shows the Python line; assert tensor.numel() before the extension.",
        ),
        confirm="The stack that PYTHONFAULTHANDLER=1 prints ends in that library.",
        source="Python's faulthandler; torch elastic",
        test="killed_sigfpe",
    ),
)
