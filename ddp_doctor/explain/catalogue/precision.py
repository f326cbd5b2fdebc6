"""Causes in mixed precision, in numbers that are not finite, and in torch.compile."""

from ddp_doctor.explain.catalogue.entries import read_families

_TEXT = r"""
[Mixed precision and torch.compile]

amp-no-inf-checks: the scaler found no gradient to check
  /No inf checks were recorded for this optimizer/
  why: The optimizer has no gradient: no backward, or its parameters are not the model's
  fix: scaler.scale(loss).backward() before scaler.step; make the optimizer after the model was
    moved and wrapped; skip the step if there was no backward.

amp-fp16-weights: the model's weights are float16 and the scaler can't unscale their gradients
  /Attempting to unscale (?:BF16|FP16) gradients/
  why: With a GradScaler weights stay float32; autocast makes the copies
  fix: No model.half(); load with torch_dtype=float32; or bfloat16 without a scaler.

amp-dtype (likely): a tensor has the wrong type
  /expected (?:m1 and m2 to have the same dtype|scalar type \w+ but found)/
  /\"nll_loss\w*\" not implemented for '\w+'/ /expected target dtype to be Long/
  /result type Float can't be cast to the desired output type Long/ /Found dtype \w+ but expected /
  /mat1 and mat2 must have the same dtype, but got \w+ and /
  /Input type \([\w.]+\) and bias type \([\w.]+\) should be the same/
  /FlashAttention only supports? fp16 and bf16 data type/
  why: One part runs outside of autocast, was cast by hand, or comes from numpy (float64, integers)
  case type Long but|dtype to be Long|output type Long|dtype Long|nll_loss => The labels have the
    wrong type for the loss => labels.long() for cross_entropy; labels.float() for BCEWithLogitsLoss
    and MSE.
  fix: with torch.autocast(device.type, dtype=torch.bfloat16): around forward and loss; no .half()
    beside it; .to(weight.dtype) where it is needed; .float() for what numpy made.

amp-unsupported: this device or operation does not support the float type that was asked for
  /Current CUDA Device does not support bfloat16/ /Your setup doesn't support bf16/gpu/
  /bf16 mixed precision requires PyTorch/ /User specified an unsupported autocast device_type/
  /\"(?!\w*cuda)\w+\" not implemented for '(?:Half|BFloat16)'/
  why: bfloat16 needs an Ampere GPU or newer; a CPU lacks some operations of float16
  fix: float16 with a GradScaler, or float32; the model on the GPU before .half().

amp-nan: loss or gradient is NaN or infinite
  /[Ll]oss is (?:nan|NaN|inf(?:inite|inity)?\b)/ /[Ll]oss became (?:infinite|NaN)/
  /grad_scale is too small/ /(?:nan|NaN|inf)\b.*[Ss]topping training/ /(?:NaN|Inf)\. Stop training/
  /Minimum loss scale reached/ /Function '(?P<name>\w+)' returned nan values in its \d+th output/
  /(?:Rank (?P<ranks>\d+): )?found (?:NaN|Inf) in (?:(?:local|forward) )*(?P<what>loss|grad)\b/
  /The total norm of order [\d.]+ for gradients from `parameters` is non-finite/
  /[Gg]radients? (?:are|is) [Nn]a[Nn]/ /probability tensor contains either `inf`, `nan`/
  /but found invalid values:\s+tensor\(.*nan/ /Current loss scale already at minimum/
  /reducing loss scale to (?:0\.0|\d(?:\.\d+)?e-)/
  why: Most often the learning rate is too high, float16 overflowed, a sample or a loaded weight has
    NaN, log(0) or 1/0, or a mask leaves a softmax nothing
  fix: Clip gradients, warm up, lower the learning rate, bfloat16 instead of float16; assert
    torch.isfinite(x).all() on inputs; set_detect_anomaly(True) shows where; eps in log and sqrt.

compile-failed (generic): torch.compile could not compile the model
  /BackendCompilerFailed: / /AssertionError: expected size \d+==\d+, stride /
  /torch\._dynamo\.config\.suppress_errors = True/ /torch\._(?:dynamo|inductor)\.exc\.\w+/
  /DDPOptimizer backend: Found a higher order op in the graph/
  /Data[- ]dependent (?:branching|control flow|operator)/
  why: It can't trace or compile this code; the lines below the exception's name say why
  fix: Train without torch.compile first; TORCHDYNAMO_VERBOSE=1;
    torch._dynamo.config.optimize_ddp=False for operators in DDP's buckets; @torch.compiler.disable
    on the part that fails; fullgraph=False, and no .item() or print in forward.

compile-cache (likely): processes got into each other's way in the cache of compiled kernels
  /\[Errno (?:2|16|39|116)\] .*(?:\.triton\/|triton_|torchinductor_)/
  why: Triton and Inductor keep kernels in a folder that all processes share; on a network file
    system, as a home often is, one replaces or removes a file that another one reads
  fix: TRITON_CACHE_DIR=/tmp/triton-$USER and TORCHINDUCTOR_CACHE_DIR=/tmp/inductor-$USER on each
    node, or one folder per rank; remove the old ones; a newer triton.

compile-compiler: no compiler that fits torch, or it failed
  /Error building extension '\w+'/ /Ninja is required to load C\+\+ extensions/ /InvalidCxxCompiler/
  /MissingCUDAException/ /CalledProcessError: Command '\['\S*(?:cc|clang|ninja|\+\+)'/
  /No working C\+\+ compiler found/ /Failed to find C compiler\. Please specify via CC/
  /Cannot find a working triton installation/ /Compiler: cl is not found/
  /nvcc fatal +: Unsupported gpu architecture/ /unsupported GNU version! gcc versions later than/
  /fatal error: (?:Python|cuda\w*)\.h: No such file/
  /Installed CUDA version \S+ does not match the version torch was compiled with \S+ un/
  why: Extensions and Inductor need a C++ compiler, Python's headers, Triton, torch's CUDA toolkit
  fix: Look above for its first error. apt install build-essential python3-dev; set CUDA_HOME.
  or_else: The code that it compiles is wrong: its first error says so.
  case GNU version => The C++ compiler is newer than this CUDA toolkit allows => CC and CXX of an
    older gcc, or a newer toolkit of the same major version as torch's.
  case cuda\w*\.h => Headers of the CUDA toolkit are missing => Its dev packages, of
    torch.version.cuda.
  case Python\.h => Python's headers are missing => apt install python3-dev, of this Python.
  case gpu arch => nvcc is older than this GPU, or was asked for one that is none => A newer toolkit
    of torch's major version; TORCH_CUDA_ARCH_LIST=8.6, say; a newer package, if it made up the
    name.
  case CUDA version => nvcc is not of torch's CUDA => CUDA_HOME=that of torch.version.cuda.
  case working triton|No module named .triton => Triton is missing, or does not fit this torch =>
    pip install triton, as torch's requirements name it (triton-windows); or torch.compile off.
  case Failed to find C comp|No working|cl is not => No compiler => build-essential of apt; MSVC.
"""

FAMILIES = read_families(_TEXT)
