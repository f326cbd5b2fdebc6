"""Causes in the model itself: devices, shapes, batch norm."""

from ddp_doctor.explain.events import Cause, Fix

CAUSES = (
    Cause(
        code="graph-device-mixed",
        title="tensors of one operation are on different devices",
        phrases=(
            r"Expected all tensors to be on the same device, but (?P<what>.+)",
            r"Input type \(torch\.\w*\.?FloatTensor\) and weight type \(torch\.\w*\.?FloatTensor\) "
            r"should be the same",
            r"module must have its parameters and buffers on device",
            r"Expected tensor for argument #\d+ '\w+' to have the same device as tensor for",
            r"Input and (?:parameter|hidden) tensors are not at the same device",
        ),
        why="A batch, a buffer or a new tensor was not moved to this rank's GPU, or to cuda:0 "
        "instead of cuda:LOCAL_RANK",
        fix=Fix(
            plain="device = torch.device('cuda', int(os.environ['LOCAL_RANK'])); "
            "torch.cuda.set_device(device) before anything else; .to(device) for model and batch; "
            "register_buffer for constants; device=x.device for new tensors in forward.",
            lightning="use self.device in the module and register_buffer",
            accelerate="use accelerator.device, and accelerator.prepare the loader",
        ),
        confirm="Print the device of each argument in the line that the traceback names.",
        source="aten/src/ATen/TensorIterator.cpp",
        no_test="needs a GPU; composed from the format string",
    ),
    Cause(
        code="graph-ddp-device",
        title="DDP was given devices that do not fit its module",
        phrases=(
            r"DistributedDataParallel device_ids and output_device arguments only work with",
            r"device_ids can only be None or contain a single element",
            r"DistributedDataParallel's input module must be on the same type of devices",
        ),
        why="device_ids is for a module on one GPU. A CPU module, or one over several GPUs, "
        "takes none",
        fix=Fix(
            plain="GPU: model.to(local_rank), DDP(model, device_ids=[local_rank]). CPU or gloo: "
            "DDP(model). One process per GPU: device_ids has one element.",
            lightning="no .to() or .cuda() of your own: Trainer(accelerator=..., "
            "devices=N) places the model",
            accelerate="accelerator.prepare(model) places and wraps it; no DDP(...) of your own",
        ),
        confirm="print({p.device for p in model.parameters()}).",
        source="torch/nn/parallel/distributed.py",
        test="graph_ddp_device",
    ),
    Cause(
        code="graph-lazy",
        title="DDP was given parameters that are not initialized",
        phrases=(
            r"Modules with uninitialized parameters can't be used with `DistributedDataParallel`",
        ),
        why="A lazy module (LazyLinear, LazyConv) gets its shape in its first forward",
        fix=Fix(
            plain="Run one forward on a sample batch before DDP(model), the same on all ranks."
        ),
        confirm="Look for nn.Lazy in the model.",
        source="torch/nn/parallel/distributed.py",
        test="graph_lazy",
    ),
    Cause(
        code="graph-batchnorm-single",
        title="BatchNorm in training got one value per channel",
        phrases=(r"Expected more than 1 value per channel when training, got input size",),
        why="The last batch of this rank has one sample, and its spatial size is 1",
        fix=Fix(
            plain="DataLoader(..., drop_last=True), a larger batch, or GroupNorm.",
            suite="--drop_last",
            trainer="TrainingArguments(dataloader_drop_last=True)",
        ),
        confirm="len(dataset) per rank modulo the batch size is 1.",
        source="torch/nn/functional.py",
        test="graph_batchnorm_single",
    ),
    Cause(
        code="graph-syncbn",
        title="SyncBatchNorm was used where it can't work",
        phrases=(
            r"SyncBatchNorm expected input tensor to be on (?:a )?GPU",
            r"SyncBatchNorm is only supported within torch\.nn\.parallel\.DistributedDataParallel",
        ),
        why="SyncBatchNorm needs GPU tensors and a process group",
        fix=Fix(
            plain="Convert only when training on GPUs: if device.type == 'cuda': "
            "model = nn.SyncBatchNorm.convert_sync_batchnorm(model).",
            lightning="Trainer(sync_batchnorm=True) only with accelerator='gpu'",
            suite="remove --sync_batchnorm on the CPU",
        ),
        confirm="The device of the model is the CPU.",
        source="torch/nn/modules/batchnorm.py",
        test="graph_syncbn",
    ),
    Cause(
        code="graph-shapes",
        title="the shapes of two tensors do not fit",
        phrases=(
            r"mat1 and mat2 shapes cannot be multiplied \((?P<shapes>[\dx]+ and [\dx]+)\)",
            r"The size of tensor a \(\d+\) must match the size of tensor b \(\d+\)",
            r"Given groups=\d+, weight of size .* expected input.* to have \d+ channels",
            r"shape '\[.*\]' is invalid for input of size \d+",
        ),
        is_generic=True,
        why="The model got an input of another shape than it was built for",
        fix=Fix(
            plain="Print the batch's shape before the line that the traceback names; the last "
            "batch "
            "of an epoch is smaller (drop_last=True, or no fixed batch size in view()).",
        ),
        confirm="Run that one batch through the model in one process.",
        source="aten/src/ATen/native/LinearAlgebra.cpp",
        test="graph_shapes",
    ),
    Cause(
        code="graph-inference-mode",
        title="a tensor of inference mode is used in training",
        phrases=(
            r"Inference tensors cannot be saved for backward",
            r"Inplace update to inference tensor outside InferenceMode",
            r"Cannot set version_counter for inference tensor",
        ),
        why="Weights, buffers or cached inputs were made under torch.inference_mode()",
        fix=Fix(
            plain="torch.no_grad() instead of torch.inference_mode() where the tensor is made; or "
            "x = x.clone() outside of it.",
            lightning="Trainer(inference_mode=False)",
        ),
        confirm="print(x.is_inference()) for the tensors in the line of the traceback.",
        source="torch/csrc/autograd/variable.cpp",
        test="graph_inference_mode",
    ),
    Cause(
        code="fsdp-requires-grad",
        title="FSDP was given frozen and trained parameters in one unit",
        phrases=(
            r"Must flatten tensors with uniform `requires_grad` when `use_orig_params=False`",
            r"`FlatParameter` requires uniform `requires_grad`",
        ),
        why="FSDP joins the parameters of a unit to one: all of them, or none, can have gradients",
        fix=Fix(
            plain="FullyShardedDataParallel(model, use_orig_params=True), or fully_shard of torch "
            "2.6; or wrap frozen and trained modules (LoRA) as units of their own.",
            accelerate="fsdp_use_orig_params: true in the config",
            lightning="FSDPStrategy(use_orig_params=True)",
            trainer='fsdp_config={"use_orig_params": True}; PEFT: '
            "peft.utils.other.fsdp_auto_wrap_policy",
        ),
        confirm="print({p.requires_grad for p in module.parameters()}) of each unit.",
        source="torch/distributed/fsdp/_flat_param.py",
        test="fsdp_requires_grad",
    ),
    Cause(
        code="fsdp-past-wrapper",
        title="sharded weights were used without the FSDP unit that gathers them",
        phrases=(
            r"got mixed torch\.Tensor and DTensor",
            r"'weight' must be 2-D",
            r"weight should have at least three dimensions",
            r"mat2 must be a matrix, got 1-D tensor",
        ),
        why="A submodule was called directly, or another method than forward, so that FSDP did "
        "not gather its weights; or weights are shared with a module in another unit",
        fix=Fix(
            plain="Call the outermost wrapped module's forward; register_fsdp_forward_method for "
            "another method (fully_shard); modules that share weights belong to one unit; "
            "with FSDP.summon_full_params(model): for evaluation or generate().",
        ),
        confirm="The first line of the program in the traceback calls a submodule.",
        source="torch/distributed/tensor/_dispatch.py, torch/distributed/fsdp",
        test="fsdp_past_wrapper",
    ),
)
