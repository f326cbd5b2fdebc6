"""Causes of Windows and macOS, and of packages around DDP."""

from ddp_doctor.explain.catalogue.entries import read_families

_TEXT = r"""
[Windows, macOS, packages]

windows-libuv (accuses nobody): this torch was built without libuv
  /was buil[dt] without libuv support/
  why: torch 2.4 and newer want libuv for the store; wheels for Windows had none
  fix: set USE_LIBUV=0 before torchrun; init_method='tcp://127.0.0.1:29500?use_libuv=0'.

windows-dll (likely): Windows could not load a DLL of torch or CUDA into a process
  /\[WinError (?:126|127|1455)\]/ /DLL load failed while importing /
  why: 1455: each worker loads torch's DLLs anew, and Windows reserves memory for them. Else the
    Visual C++ runtime is missing, or another CUDA or OpenMP comes first in PATH
  fix: 1455: fewer num_workers, a larger paging file. Else the current Visual C++ Redistributable.

openmp-mkl (accuses nobody): MKL and another OpenMP library were loaded together
  /MKL_THREADING_LAYER=INTEL is incompatible with/
  why: Something loaded libgomp before numpy (torch does), and MKL wants Intel's OpenMP
  fix: MKL_THREADING_LAYER=GNU in the job's environment; or import numpy before torch.

openmp-threads (likely): the process could not start a thread
  /libgomp: Thread creation failed: / /can't start new thread/ /pthread_create failed/
  /RuntimeError: Resource temporarily unavailable$/
  /(?:fork|clone|[Tt]hread\w*|BlockingIOError)\b(?!.*Accept failed).*Resource temporarily
    unavailable(?!: ')/
  why: Ranks x workers x OpenMP threads reached the limit (ulimit -u, pids of the container)
  fix: OMP_NUM_THREADS=1; fewer workers; ulimit -u; --pids-limit of the container.

macos-mps: the Apple GPU lacks this operation or type
  /The operator '[^']+' is not currently implemented for the MPS device/
  /Cannot convert a MPS Tensor to float64/ /MPS\w+\.mm:\d+: failed assertion/
  why: MPS has one GPU, no process group for its tensors, and fewer operators
  fix: PYTORCH_ENABLE_MPS_FALLBACK=1; DDP on the CPU with gloo; float32.

tracker-login (likely): a tracking service refuses this job, or can't be reached
  /wandb\.errors\.(?:\w+\.)*UsageError: api_key not configured/
  /wandb: ERROR (?i:.*(?:api.key|permission|unauthorized|network|connect|communicat|40[13]))/
  /wandb\.errors\.(?:\w+\.)*(?:CommError|AuthenticationError|Error: Couldn't communicate)/
  why: wandb (or another tracker) has no key on this node, or no network
  fix: WANDB_MODE=offline or wandb login; start trackers on rank 0 only; Trainer: report_to='none'.
"""

FAMILIES = read_families(_TEXT)
