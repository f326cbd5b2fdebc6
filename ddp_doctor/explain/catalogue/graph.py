"""Causes in the model and its graph: what DDP expects of forward and backward."""

from ddp_doctor.explain.events import Blame, Cause, Tier

CAUSES = (
    Cause(
        code="graph-unused",
        title="parameters of the model got no gradient in the last backward",
        phrases=(
            r"Expected to have finished reduction in the prior iteration before starting a new "
            r"one\. This error indicates that your module has parameters",
            r"[Pp]arameter indices which did not receive grad for rank (?P<ranks>\d+): [\d ]+",
            r"[Pp]arameters which did not receive grad for rank (?P<ranks>\d+): ",
            r"parameters (?:in this model |that )were not used in producing the loss returned "
            r"by training_step",
        ),
        blame=Blame.SPEAKER,
        why="DDP waits for one gradient per parameter. Forward skipped a layer, or returned an "
        "output that the loss does not use, or backward raised an error that was caught",
        fix="Name the parameters with TORCH_DISTRIBUTED_DEBUG=INFO. Then use them in every "
        "forward, or set requires_grad=False before DDP(model), or delete them. If they are meant "
        "to be unused: DistributedDataParallel(model, find_unused_parameters=True). If an output "
        "is not part of the loss: return only what the loss uses.",
        lightning='Trainer(strategy="ddp_find_unused_parameters_true")',
        accelerate="Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])",
        trainer="TrainingArguments(ddp_find_unused_parameters=True)",
        confirm="After loss.backward() print [n for n, p in model.named_parameters() if "
        "p.requires_grad and p.grad is None].",
    ),
    Cause(
        code="graph-static-changed",
        title="the graph changed although static_graph=True promises that it does not",
        phrases=(
            r"This error indicates that your training graph has changed in this iteration",
            r"not compatible with static_graph set to True",
            r"static graph training has unused parameters",
        ),
        why="With static_graph each step must use the same parameters the same number of times",
        fix="Remove static_graph=True (or model._set_static_graph()); use "
        "find_unused_parameters=True if parameters are unused in some steps.",
        lightning="DDPStrategy(static_graph=False)",
        accelerate="DistributedDataParallelKwargs(static_graph=False)",
        confirm="Train without static_graph: the message goes away, or names the unused "
        "parameters.",
    ),
    Cause(
        code="graph-ready-twice",
        title="a parameter got its gradient twice in one backward",
        phrases=(
            r"Expected to mark a variable ready only once",
            r"Parameter at index \d+(?: with name \S+)? has been marked as ready twice",
        ),
        why="A parameter is used in several reentrant checkpoints or in several forwards before "
        "one backward, or outside of DDP's forward",
        fix="torch.utils.checkpoint.checkpoint(..., use_reentrant=False); or "
        "DistributedDataParallel(model, static_graph=True) if the graph is the same in each step; "
        "do one forward per backward, and drop find_unused_parameters=True if no parameter is "
        "unused.",
        lightning="DDPStrategy(static_graph=True)",
        accelerate="DistributedDataParallelKwargs(static_graph=True)",
        trainer="TrainingArguments(gradient_checkpointing_kwargs={'use_reentrant': False}, "
        "ddp_find_unused_parameters=False)",
        confirm="TORCH_DISTRIBUTED_DEBUG=INFO names the parameter.",
    ),
    Cause(
        code="graph-inplace",
        title="a tensor that backward needs was changed in place",
        phrases=(r"has been modified by an inplace operation",),
        why="Something wrote into a tensor after forward: an in-place operation of the model, or "
        "DDP's broadcast of the buffers when forward runs twice before backward",
        fix="If forward runs twice per step (GAN, siamese, contrastive): "
        "DistributedDataParallel(model, broadcast_buffers=False), or put both inputs in one "
        "forward, or SyncBatchNorm. Otherwise replace x += y by x = x + y and ReLU(inplace=True) "
        "by ReLU().",
        lightning="DDPStrategy(broadcast_buffers=False)",
        accelerate="DistributedDataParallelKwargs(broadcast_buffers=False)",
        trainer="TrainingArguments(ddp_broadcast_buffers=False)",
        confirm="torch.autograd.set_detect_anomaly(True) prints the forward line. If one process "
        "without DDP does not fail, it is the buffers.",
        or_else="With buffers (BatchNorm) and two forwards it is DDP's buffer broadcast; without "
        "DDP in the stack it is the model's own in-place operation.",
    ),
    Cause(
        code="graph-backward-twice",
        title="backward went through the same graph twice",
        phrases=(r"Trying to backward through the graph a second time",),
        why="The loss of an earlier step is still part of this one, or backward was called twice",
        fix="Detach what is kept between steps (hidden = hidden.detach(), total += loss.item()); "
        "add losses and call backward once; retain_graph=True only if two backwards are meant.",
        confirm="One step after a restart works, the second fails: state is kept between steps.",
    ),
    Cause(
        code="graph-no-grad",
        title="the loss has no graph",
        phrases=(r"element \d+ of tensors does not require grad and does not have a grad_fn",),
        why="Forward ran under no_grad, its output was detached or turned into numbers, or all "
        "parameters are frozen",
        fix="Look for torch.no_grad(), .detach(), .item(), .data, torch.tensor(loss) between the "
        "model and the loss; with reentrant checkpointing and frozen inputs use "
        "use_reentrant=False or model.enable_input_require_grads().",
        trainer="with PEFT and gradient_checkpointing: "
        "gradient_checkpointing_kwargs={'use_reentrant': False}",
        lightning="training_step returns the loss itself, not loss.item() or loss.detach()",
        confirm="print(loss.requires_grad, loss.grad_fn) before backward.",
    ),
    Cause(
        code="graph-nothing-to-train",
        title="DDP was given a module without a parameter to train",
        phrases=(
            r"DistributedDataParallel is not needed when a module doesn't have any parameters? "
            r"that",
        ),
        why="All parameters are frozen (requires_grad=False), or the module has none",
        fix="Wrap only the modules that are trained; freeze after deciding what is trained, and do "
        "not wrap frozen teachers or encoders.",
        confirm="print(sum(p.requires_grad for p in model.parameters())).",
    ),
    Cause(
        code="graph-wrapped-attribute",
        title="an attribute of the model was asked of the wrapper around it",
        phrases=(
            r"'(?P<what>DistributedDataParallel|DataParallel|FullyShardedDataParallel)' object "
            r"has no attribute",
        ),
        blame=Blame.NOBODY,
        why="{what} has the model in its attribute module, and passes on its forward only",
        fix="model.module.NAME, or keep the bare model beside the wrapped one.",
        accelerate="accelerator.unwrap_model(model).NAME",
        confirm="type(model) in the line before.",
    ),
    Cause(
        code="graph-no-answer",
        title="another rank gave no answer when DDP compared the models",
        phrases=(r"has inconsistent 0 params",),
        tier=Tier.LOST,
        why="A count of 0 is no model: the exchange of the counts failed. That rank ended, or data "
        "does not get from GPU to GPU",
        fix="Read that rank's log first; else NCCL_DEBUG=INFO, and try NCCL_P2P_DISABLE=1.",
        confirm="torchrun with an all_reduce of one number in place of the training.",
    ),
    Cause(
        code="graph-models-differ",
        title="the ranks do not have the same model",
        phrases=(
            r"DDP expects same model across all ranks, but Rank \d+ has \d+ params(?!, while "
            r"rank \d+ has inconsistent 0 params)",
            r"params\[\d+\] in this process with sizes .* appears not to match",
            r"\[\d+\]: params\[\d+\] in this process with sizes",
        ),
        tier=Tier.MISMATCH,
        why="The ranks built models with another number or another shape of parameters: other "
        "arguments, other data (number of classes, vocabulary), or another checkout",
        fix="Build the model from what all ranks share: compute vocabulary and number of classes "
        "on rank 0 and broadcast_object_list it; same code and files on each node.",
        confirm="print(rank, [tuple(p.shape) for p in model.parameters()]) before DDP(model).",
    ),
    Cause(
        code="graph-checkpoint-differs",
        title="the recomputed forward differs from the first one",
        phrases=(
            r"torch\.utils\.checkpoint: (?:A different number of tensors was saved|Recomputed "
            r"values for the following tensors have different metadata)",
            r"torch\.utils\.checkpoint: (?:Unpack is being triggered|trying to save more tensors)",
        ),
        why="Code under checkpoint() does something else the second time: randomness outside of "
        "torch, a counter, a cache, or autocast that is not active in backward",
        fix="Make the checkpointed function depend on its arguments only; keep autocast around it; "
        "debug=True of checkpoint() shows both runs.",
        confirm="checkpoint(..., debug=True) prints the operations of both forwards.",
    ),
)


MODEL = (
    Cause(
        code="graph-device-mixed",
        title="tensors of one operation are on different devices",
        phrases=(
            r"Expected all tensors to be on the same device, but ",
            r"Input type \(torch\.\w*\.?FloatTensor\) and weight type "
            r"\(torch\.\w*\.?FloatTensor\) should be the same",
            r"module must have its parameters and buffers on device",
            r"Expected tensor for argument #\d+ '\w+' to have the same device as tensor for",
            r"Input and (?:parameter|hidden) tensors are not at the same device",
        ),
        why="A batch, a buffer or a new tensor was not moved to this rank's GPU, or to cuda:0 "
        "instead of cuda:LOCAL_RANK",
        fix="device = torch.device('cuda', int(os.environ['LOCAL_RANK'])); "
        "torch.cuda.set_device(device) before anything else; .to(device) for model and batch; "
        "register_buffer for constants; device=x.device for new tensors in forward.",
        lightning="use self.device in the module and register_buffer",
        accelerate="use accelerator.device, and accelerator.prepare the loader",
        confirm="Print the device of each argument in the line that the traceback names.",
    ),
    Cause(
        code="graph-ddp-device",
        title="DDP was given devices that do not fit its module",
        phrases=(
            r"DistributedDataParallel device_ids and output_device arguments only work with",
            r"device_ids can only be None or contain a single element",
            r"DistributedDataParallel's input module must be on the same type of devices",
        ),
        why="device_ids is for a module on one GPU. A CPU module, or one over several GPUs, takes "
        "none",
        fix="GPU: model.to(local_rank), DDP(model, device_ids=[local_rank]). CPU or gloo: "
        "DDP(model). One process per GPU: device_ids has one element.",
        lightning="no .to() or .cuda() of your own: Trainer(accelerator=..., devices=N) places the "
        "model",
        accelerate="accelerator.prepare(model) places and wraps it; no DDP(...) of your own",
        confirm="print({p.device for p in model.parameters()}).",
    ),
    Cause(
        code="graph-lazy",
        title="DDP was given parameters that are not initialized",
        phrases=(
            r"Modules with uninitialized parameters can't be used with `DistributedDataParallel`",
        ),
        why="A lazy module (LazyLinear, LazyConv) gets its shape in its first forward",
        fix="Run one forward on a sample batch before DDP(model), the same on all ranks.",
        confirm="Look for nn.Lazy in the model.",
    ),
    Cause(
        code="graph-batchnorm-single",
        title="BatchNorm in training got one value per channel",
        phrases=(r"Expected more than 1 value per channel when training, got input size",),
        why="The last batch of this rank has one sample, and its spatial size is 1",
        fix="DataLoader(..., drop_last=True), a larger batch, or GroupNorm.",
        trainer="TrainingArguments(dataloader_drop_last=True)",
        confirm="len(dataset) per rank modulo the batch size is 1.",
    ),
    Cause(
        code="graph-syncbn",
        title="SyncBatchNorm was used where it can't work",
        phrases=(
            r"SyncBatchNorm expected input tensor to be on (?:a )?GPU",
            r"SyncBatchNorm is only supported within torch\.nn\.parallel\.DistributedDataParallel",
        ),
        why="SyncBatchNorm needs GPU tensors and a process group",
        fix="Convert only when training on GPUs: if device.type == 'cuda': model = "
        "nn.SyncBatchNorm.convert_sync_batchnorm(model).",
        lightning="Trainer(sync_batchnorm=True) only with accelerator='gpu'",
    ),
    Cause(
        code="graph-shapes",
        title="the shapes of two tensors do not fit",
        phrases=(
            r"mat1 and mat2 shapes cannot be multiplied \([\dx]+ and [\dx]+\)",
            r"The size of tensor a \(\d+\) must match the size of tensor b \(\d+\)",
            r"Given groups=\d+, weight of size .* expected input.* to have \d+ channels",
            r"shape '\[.*\]' is invalid for input of size \d+",
            r"Sizes of tensors must match except in dimension",
            r"Gather got an input of invalid size",
        ),
        is_generic=True,
        why="The model got an input of another shape than it was built for",
        fix="Print the batch's shape before the line that the traceback names; the last batch of "
        "an epoch is smaller (drop_last=True, or no fixed batch size in view()).",
        confirm="Run that one batch through the model in one process.",
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
        fix="torch.no_grad() instead of torch.inference_mode() where the tensor is made; or x = "
        "x.clone() outside of it.",
        lightning="Trainer(inference_mode=False)",
        confirm="print(x.is_inference()) for the tensors in the line of the traceback.",
    ),
    Cause(
        code="fsdp-requires-grad",
        title="FSDP was given frozen and trained parameters in one unit",
        phrases=(
            r"Must flatten tensors with uniform `requires_grad` when `use_orig_params=False`",
            r"`FlatParameter` requires uniform `requires_grad`",
        ),
        why="FSDP joins the parameters of a unit to one: all of them, or none, can have gradients",
        fix="FullyShardedDataParallel(model, use_orig_params=True), or fully_shard of torch 2.6; "
        "or wrap frozen and trained modules (LoRA) as units of their own.",
        accelerate="fsdp_use_orig_params: true in the config",
        lightning="FSDPStrategy(use_orig_params=True)",
        trainer='fsdp_config={"use_orig_params": True}; PEFT: '
        "peft.utils.other.fsdp_auto_wrap_policy",
        confirm="print({p.requires_grad for p in module.parameters()}) of each unit.",
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
        why="A submodule was called directly, or another method than forward, so that FSDP did not "
        "gather its weights; or weights are shared with a module in another unit",
        fix="Call the outermost wrapped module's forward; register_fsdp_forward_method for another "
        "method (fully_shard); modules that share weights belong to one unit; with "
        "FSDP.summon_full_params(model): for evaluation or generate().",
        confirm="The first line of the program in the traceback calls a submodule.",
        or_else="The line is outside of forward (a mask, an average, a clip of the norm): a plain "
        "tensor met a sharded one; distribute_tensor(...) it, or take .full_tensor() of the other.",
    ),
)
