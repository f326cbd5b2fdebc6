"""Causes in the model and its graph: what DDP expects of forward and backward."""

from ddp_doctor.explain.catalogue.entries import read_families

_TEXT = r"""
[Graph: what DDP expects of forward and backward]

graph-unused (accuses speaker): parameters of the model got no gradient in the last backward
  /Expected to have finished reduction in the prior iteration .*your module has parameters/
  /[Pp]arameter indices which did not receive grad for rank (?P<ranks>\d+): [\d ]+/
  /[Pp]arameters which did not receive grad for rank (?P<ranks>\d+): /
  /parameters (?:in this model |that )were not used in producing the loss returned by training_step/
  why: DDP waits for one gradient per parameter. Forward skipped a layer, or returned an output that
    the loss does not use, or backward raised an error that was caught
  fix: Name the parameters with TORCH_DISTRIBUTED_DEBUG=INFO. Then use them in every forward, or set
    requires_grad=False before DDP(model), or delete them; return only what the loss uses. Meant to
    be unused: DistributedDataParallel(model, find_unused_parameters=True).
  lightning: Trainer(strategy="ddp_find_unused_parameters_true")
  accelerate: kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)]
  trainer: TrainingArguments(ddp_find_unused_parameters=True)

graph-static-changed: the graph changed although static_graph=True promises that it does not
  /This error indicates that your training graph has changed in this iteration/
  /not compatible with static_graph set to True/ /static graph training has unused parameters/
  why: With static_graph each step must use the same parameters the same number of times
  fix: Remove static_graph=True; find_unused_parameters=True if some are unused in some steps.

graph-ready-twice: a parameter got its gradient twice in one backward
  /Expected to mark a variable ready only once/
  /Parameter at index \d+(?: with name \S+)? has been marked as ready twice/
  why: A parameter is used in several checkpoints or forwards before one backward, or outside of DDP
  fix: torch.utils.checkpoint.checkpoint(..., use_reentrant=False); or
    DistributedDataParallel(model, static_graph=True) if the graph is the same in each step; do one
    forward per backward, and drop find_unused_parameters=True if no parameter is unused.
  trainer: gradient_checkpointing_kwargs={'use_reentrant': False}, ddp_find_unused_parameters=False

graph-inplace: a tensor that backward needs was changed in place
  /has been modified by an inplace operation/
  why: Something wrote into a tensor after forward: an in-place operation of the model, or DDP's
    broadcast of the buffers when forward runs twice before backward
  fix: If forward runs twice per step (GAN, siamese, contrastive): DistributedDataParallel(model,
    broadcast_buffers=False), or put both inputs in one forward, or SyncBatchNorm. Otherwise replace
    x += y by x = x + y and ReLU(inplace=True) by ReLU().
  or_else: Without DDP in the stack it is the model's own: set_detect_anomaly(True) shows the line.

graph-backward-twice: backward went through the same graph twice
  /Trying to backward through the graph a second time/
  why: The loss of an earlier step is still part of this one, or backward was called twice
  fix: Detach what is kept between steps (hidden = hidden.detach(), total += loss.item()); add
    losses and call backward once; retain_graph=True only if two backwards are meant.

graph-no-grad: the loss has no graph
  /element \d+ of tensors does not require grad and does not have a grad_fn/
  why: It ran under no_grad, was detached or turned into numbers, or all parameters are frozen
  fix: Look for no_grad(), .detach(), .item(), .data, torch.tensor(loss) between model and loss;
    with checkpointing and frozen inputs use_reentrant=False or model.enable_input_require_grads().

graph-wrapped-attribute (accuses nobody): an attribute of the model was asked of its wrapper
  /'(?P<what>\w*DataParallel)' object has no attribute/
  why: {what} has the model in its attribute module, and passes on its forward only
  fix: model.module.NAME, or keep the bare model beside the wrapped one.
  accelerate: accelerator.unwrap_model(model).NAME

graph-no-answer (lost): a rank gave no answer when DDP compared models
  /has inconsistent (?:0|\d{8,}) params/
  why: 0 or many millions is no model's count: that rank ended, is elsewhere, or no GPU link works
  fix: Read that rank's log first; else NCCL_DEBUG=INFO, and try NCCL_P2P_DISABLE=1.

graph-models-differ (mismatch): the ranks' models differ in parameters or their layout
  /DDP expects same model across all ranks, but Rank \d+ has \d+ params(?!, while rank \d+ has
    inconsistent (?:0|\d{8,}) params)/
  /params\[\d+\] in this process with sizes .* appears not to match/
  /\[\d+\]: params\[\d+\] in this process with sizes/
  why: The ranks built models with another number or another shape of parameters: other arguments,
    other data (number of classes, vocabulary), or another checkout. `strides`: another layout only
  fix: Build the model from what all ranks share: compute vocabulary and number of classes on rank 0
    and broadcast_object_list it; same code and files on each node. `strides`: p.data =
    p.data.contiguous() for each parameter before DDP(model).

graph-checkpoint-differs: the recomputed forward differs from the first one
  /torch\.utils\.checkpoint: (?:A different number of tensors|Recomputed values for the)/
  /torch\.utils\.checkpoint: trying to save more tensors/
  why: Code under checkpoint() acts differently: randomness outside of torch, a counter, no autocast
  fix: Use only its arguments in it; autocast around it; checkpoint(debug=True) shows both runs.

[Model]

graph-device-mixed (likely): tensors of one operation are on different devices
  /[Ee]xpected (?:all tensors|\w+ and \w+) to be on the same device, but /
  /Input type \(torch\.\w*\.?FloatTensor\) and weight type \(torch\.\w*\.?FloatTensor\)/
  /module must have its parameters and buffers on device/
  /Expected tensor for argument #\d+ '\w+' to have the same device as tensor for/
  /Input and (?:parameter|hidden) tensors are not at the same device/
  why: A batch, buffer or new tensor is not on this rank's GPU, or device_map spread the model
  fix: device = torch.device('cuda', int(os.environ['LOCAL_RANK'])); torch.cuda.set_device(device)
    before anything else; .to(device) for model and batch; register_buffer for constants;
    device=x.device for new tensors in forward; no device_map='auto' in DDP.
  case deepspeed/runtime/zero/ => DeepSpeed's own tensors are mixed up: offload with this version,
    or weights that were moved after initialize() => Another deepspeed; no offload; no .to(device).
  case device_ids\[0\] => nn.DataParallel runs in a job of several processes, or on other GPUs =>
    Remove nn.DataParallel: DDP does its work; model.to(f'cuda:{LOCAL_RANK}').

graph-ddp-device: DDP or FSDP was given devices that do not fit its module
  /DistributedDataParallel device_ids and output_device arguments only work with/
  /device_ids can only be None or contain a single element/ /Inconsistent compute device and/
  /has been loaded with `device_map='auto'` in any distributed mode/
  /DistributedDataParallel's input module must be on the same type of devices/
  why: device_ids is for a module on one GPU. A CPU module, or one over several GPUs, takes none
  fix: On a GPU: model.to(local_rank), DDP(model, device_ids=[local_rank]); CPU or gloo: DDP(model).
  case device_map => The model was spread over all GPUs, and each rank would use them => No
    device_map under torchrun or accelerate launch, or device_map={'': LOCAL_RANK}; or one process.

graph-batchnorm-single: BatchNorm in training got one value per channel
  /Expected more than 1 value per channel when training, got input size/
  why: A batch of this rank, often the last, has one sample, and its spatial size is 1
  fix: DataLoader(..., drop_last=True), a larger batch, or GroupNorm.

graph-meta (generic): weights have no data: they are on the meta device, or sharded
  /Cannot copy out of meta tensor; no data/ /should be materialized from meta device/
  /but its data is not allocated yet/
  why: The model was built without memory (low_cpu_mem_usage, device_map, init_empty_weights), or
    its weights belong to ZeRO 3 or FSDP and were not gathered
  fix: Load the weights before .to(device) or DDP(model), with no device_map; model.to_empty(device)
    only if all weights are loaded after it; ZeRO 3, FSDP: the weights stay where these put them.

graph-shapes (generic, unknown): the shapes of two tensors do not fit
  /Expected input batch_size \(\d+\) to match target batch_size \(\d+\)/
  /Target size \(torch\.Size\(.*\)\) must be the same as input size/
  /0D or 1D target tensor expected, multi-target not supported/
  /mat1 and mat2 shapes cannot be multiplied \([\dx]+ and [\dx]+\)/
  /The size of tensor a \(\d+\) must match the size of tensor b \(\d+\)/
  /Given groups=\d+, weight of size .* expected input.* to have \d+ channels/
  /shape '\[.*\]' is invalid for input of size \d+/ /Gather got an input of invalid size/
  /Sizes of tensors must match except in dimension/
  /The expanded size of the tensor \(\d+\) must match the existing size/
  /Tensors must have same number of dimensions: got \d+ and \d+/
  why: The model got an input of another shape than it was built for
  case target batch_size|Target size|target tensor expected => Output and labels of a batch differ
    in number or dimensions => cross_entropy: (N, C) and (N), so logits.flatten(0, 1),
    labels.flatten(); BCE: .unsqueeze(1).
  case tensor [ab] \(0\) => A weight that is sharded (ZeRO 3, FSDP) was used outside of its module's
    forward => deepspeed.zero.GatheredParameters, summon_full_params or .full_tensor() around it.
  fix: Print the shapes before the line that is named; the last batch may be smaller (drop_last).

fsdp-requires-grad: parameters of an FSDP unit differ in dtype or requires_grad
  /Must flatten tensors with uniform dtype but got/ /Cannot flatten integer dtype tensors/
  /Must flatten tensors with uniform `requires_grad` when `use_orig_params=False`/
  /`FlatParameter` requires uniform (?:`requires_grad`|dtype)/
  why: FSDP joins the parameters of a unit to one: of one dtype, all with gradients or none
  fix: FullyShardedDataParallel(model, use_orig_params=True), or fully_shard of torch 2.6; or wrap
    frozen and trained modules (LoRA) as units of their own. dtype: model.to(torch.bfloat16) before
    it is sharded; QLoRA: bnb_4bit_quant_storage is the dtype of the others.
  case integer dtype => Quantized weights are integers, which FSDP can't flatten => 4 bits:
    bnb_4bit_quant_storage=torch.bfloat16, the dtype of the others; 8 bits: DDP, or no quantisation.

fsdp-whole-weights: whole weights were copied into a sharded model
  /aten\.copy_\.default:? got mixed torch\.Tensor and DTensor/
  /the shape in current model is torch\.Size\(\[0[],]/
  why: A plain state dict was loaded after fully_shard, tensor parallel or ZeRO 3 had made parts
  fix: torch.distributed.checkpoint.state_dict.set_model_state_dict(model, state,
    options=StateDictOptions(full_state_dict=True)); or load before the model is sharded. ZeRO 3:
    in deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0).

fsdp-past-wrapper: sharded weights were used past their FSDP unit
  /got mixed torch\.Tensor and DTensor/ /'weight' must be 2-D/
  /weight should have at least three dimensions/ /mat2 must be a matrix, got 1-D tensor/
  /are out of bounds for storage of size 0/ /does not have a sharding strategy registered/
  why: A submodule was called directly, or another method than forward, so that FSDP did not gather
    its weights; or weights are shared with a module in another unit
  fix: Call the outermost wrapped module's forward; register_fsdp_forward_method for another method
    (fully_shard); modules that share weights belong to one unit; with
    FSDP.summon_full_params(model): for evaluation or generate().
  case sharding strategy => This torch has no rule for this operator on sharded tensors => A newer
    torch; that module not in tensor parallel; or .full_tensor() before, distribute_tensor after it.
  or_else: The line is outside of forward (a mask, an average, a clip of the norm): a plain tensor
    met a sharded one; distribute_tensor(...) it, or take .full_tensor() of the other.
"""

FAMILIES = read_families(_TEXT)
