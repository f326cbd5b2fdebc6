"""Causes in mixed precision, in numbers that are not finite, and in torch.compile."""

from ddp_doctor.explain.events import Cause

CAUSES = (
    Cause(
        code="amp-unscale-twice",
        title="gradients were unscaled twice in one step",
        phrases=(
            r"unscale_\(\) has already been called on this optimizer since the last update",
            r"unscale_\(\) is being called after step",
        ),
        why="scaler.unscale_(optimizer) ran twice before scaler.update(), often because clipping "
        "runs in each micro-step of accumulation",
        fix="Per optimizer step once: scaler.unscale_(opt); clip_grad_norm_; scaler.step(opt); "
        "scaler.update().",
        accelerate="accelerator.clip_grad_norm_ only if accelerator.sync_gradients",
        lightning="Trainer(gradient_clip_val=1.0) instead of a clipping of your own",
        trainer="TrainingArguments(max_grad_norm=1.0) instead of a clipping of your own",
    ),
    Cause(
        code="amp-no-inf-checks",
        title="the scaler found no gradient to check",
        phrases=(r"No inf checks were recorded for this optimizer",),
        why="No parameter of this optimizer has a gradient: backward was not called, or the "
        "optimizer holds other parameters than the model",
        fix="scaler.scale(loss).backward() before scaler.step; make the optimizer after the model "
        "was moved and wrapped; skip the step if there was no backward.",
        confirm="print(any(p.grad is not None for g in opt.param_groups for p in g['params'])).",
    ),
    Cause(
        code="amp-fp16-weights",
        title="the model's weights are float16 and the scaler can't unscale their gradients",
        phrases=(r"Attempting to unscale (?:BF16|FP16) gradients",),
        why="With a GradScaler weights stay float32; autocast makes the copies",
        fix="No model.half(); load with torch_dtype=float32; or bfloat16 without a scaler.",
        lightning="precision='16-mixed', not '16-true'",
        trainer="load the model in float32 with fp16=True; or bf16=True",
        accelerate="load the model in float32 and give Accelerator(mixed_precision='fp16')",
        confirm="print({p.dtype for p in model.parameters()}).",
    ),
    Cause(
        code="amp-dtype",
        title="two tensors have different float types",
        phrases=(
            r"expected (?:m1 and m2 to have the same dtype|scalar type (?:Half|BFloat16|Float) "
            r"but found)",
            r"mat1 and mat2 must have the same dtype, but got \w+ and ",
            r"Input type \([\w.]+\) and bias type \([\w.]+\) should be the same",
            r"\"\w+\" not implemented for '(?:Half|BFloat16)'",
            r"FlashAttention only supports? fp16 and bf16 data type",
        ),
        why="One part runs outside of autocast, or was cast by hand",
        fix="with torch.autocast(device.type, dtype=torch.bfloat16): around forward and loss; no "
        ".half() beside it; .to(weight.dtype) where it is needed.",
        confirm="print the dtypes in the line that the traceback names.",
    ),
    Cause(
        code="amp-unsupported",
        title="this device does not support the float type that was asked for",
        phrases=(
            r"Current CUDA Device does not support bfloat16",
            r"Your setup doesn't support bf16/gpu",
            r"bf16 mixed precision requires PyTorch",
            r"User specified an unsupported autocast device_type",
        ),
        why="bfloat16 needs an Ampere GPU or newer",
        fix="float16 with a GradScaler, or float32.",
        trainer="fp16=True instead of bf16=True",
        lightning="Trainer(precision='16-mixed')",
        accelerate="Accelerator(mixed_precision='fp16')",
        confirm="torch.cuda.is_bf16_supported().",
    ),
    Cause(
        code="amp-nan",
        title="loss or gradient is NaN or infinite",
        phrases=(
            # WHY three: "loss is " alone stands in each line of many programs
            r"[Ll]oss is nan",
            r"[Ll]oss is NaN",
            r"[Ll]oss is inf",
            r"found (?:NaN|Inf) in (?:local )?(?:forward |backward )?(?P<what>loss|grad)",
            r"(?:nan|NaN|inf)\b.*[Ss]topping training",
            r"Function '(?P<name>\w+)' returned nan values in its \d+th output",
            r"The total norm of order [\d.]+ for gradients from `parameters` is non-finite",
            r"Minimum loss scale reached",
            r"[Gg]radients? (?:are|is) [Nn]a[Nn]",
            r"Current loss scale already at minimum",
            r"ValueError: Input contains (?:NaN|infinity)",
        ),
        why="The learning rate is too high, float16 overflowed, or a sample has NaN, a log of 0 or "
        "a division by 0",
        fix="Clip gradients, warm up, lower the learning rate, bfloat16 instead of float16; assert "
        "torch.isfinite(x).all() on inputs; eps in log and sqrt.",
        lightning="Trainer(gradient_clip_val=1.0, precision='bf16-mixed', detect_anomaly=True)",
        accelerate="accelerator.clip_grad_norm_; Accelerator(mixed_precision='bf16')",
        trainer="TrainingArguments(bf16=True, max_grad_norm=1.0, warmup_ratio=0.1, "
        "logging_nan_inf_filter=False)",
        confirm="torch.autograd.set_detect_anomaly(True) names the function.",
    ),
    Cause(
        code="compile-failed",
        title="torch.compile could not compile the model",
        phrases=(
            r"BackendCompilerFailed: ",
            r"torch\._dynamo\.config\.suppress_errors = True",
            r"torch\._inductor\.exc\.\w+",
            r"DDPOptimizer backend: Found a higher order op in the graph",
            r"torch\._dynamo\.exc\.\w+",
            r"Data[- ]dependent (?:branching|control flow|operator)",
        ),
        why="It can't trace or compile this code; the lines below the exception's name say why",
        fix="Train without torch.compile first; TORCHDYNAMO_VERBOSE=1; "
        "torch._dynamo.config.optimize_ddp=False for operators in DDP's buckets; "
        "@torch.compiler.disable on the part that fails; fullgraph=False, and no .item(), print or "
        "side effects of Python in forward.",
        trainer="torch_compile=False",
        is_generic=True,
    ),
    Cause(
        code="compile-compiler",
        title="no compiler was found that fits torch",
        phrases=(
            r"InvalidCxxCompiler",
            r"No working C\+\+ compiler found",
            r"Failed to find C compiler\. Please specify via CC",
            r"Cannot find a working triton installation",
            r"Compiler: cl is not found",
            r"fatal error: Python\.h: No such file",
            r"Installed CUDA version \S+ does not match the version torch was compiled with \S+ un",
        ),
        why="Inductor and extensions (DeepSpeed's) need a C++ compiler, Python's headers, for GPUs "
        "Triton, and the CUDA toolkit that torch was built with",
        fix="apt install build-essential python3-dev; pip install triton (triton-windows); "
        "CUDA_HOME=the toolkit of torch.version.cuda; or torch.compile off.",
        confirm="c++ --version and python -c 'import triton' on the node.",
    ),
)
