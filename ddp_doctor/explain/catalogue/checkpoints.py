"""Causes in checkpoints: their names, devices, formats, and who writes them."""

from ddp_doctor.explain.catalogue.entries import read_families

_TEXT = r"""
[Checkpoints]

checkpoint-module-prefix: names differ by a prefix: `module.` of DDP or `_orig_mod.` of compile
  /(?:Missing|Unexpected) key\(s\) in state_dict: .*?\"(?:module|_orig_mod)\./
  why: It was saved from the wrapper and loaded into the bare model, or the other way round
  fix: Save model.module.state_dict() (of a compiled model model._orig_mod.state_dict()), load into
    the bare model before DDP(model). An old file: state =
    {k.removeprefix('module.').removeprefix('_orig_mod.'): v for k, v in state.items()}.
  accelerate: accelerator.unwrap_model(model, keep_torch_compile=False).state_dict()

checkpoint-size (likely): a parameter of the checkpoint has another shape than the model's
  /size mismatch for [\w.]+: copying a param with shape torch\.Size\((?!\[0[],]).*?\) from
    checkpoint, the shape in current model is torch\.Size\((?!\[0[],]).*?\)/
  why: Another number of classes, another vocabulary or another width
  fix: The arguments of the checkpoint; for a new head drop its names and load with strict=False.

checkpoint-keys (generic): the checkpoint belongs to another model
  /Error\(s\) in loading state_dict for / /(?:Missing|Unexpected) key\(s\) in state_dict: /
  why: Names of parameters in the file and in the model differ
  fix: Compare set(state) and set(model.state_dict()); strict=False only if meant.

checkpoint-weights-only (generic): torch.load refuses what is more than weights, since 2.6
  /Weights only load failed/ /WeightsUnpickler error/
  why: weights_only=True is the default since torch 2.6; the file has objects that it does not allow
  fix: Save plain dicts, tensors and numbers. A file that you made yourself:
    torch.serialization.add_safe_globals([Class]), or weights_only=False; never for others' files.

checkpoint-device: the checkpoint's tensors go to a device where they can't be used
  /Attempting to deserialize object on (?:a )?CUDA device/ /RNG state must be a torch\.ByteTensor/
  why: torch.load puts tensors where they were (another GPU number, or a GPU at all), or
    map_location='cuda' moved the random state, too, which belongs on the CPU
  fix: torch.load(path, map_location='cpu'), then load_state_dict; else all ranks fill GPU 0.

checkpoint-corrupt (likely): a file is incomplete, damaged or of another kind
  /PytorchStreamReader failed (?:reading|locating|finding)/ /failed finding central directory/
  /(?:storage has wrong size:|unexpected EOF,) expected \d+ (?:got|more bytes)/
  /EOFError: Ran out of input/ /invalid load key, '(?P<key>[^']*)'/
  /Error while deserializing header: (?P<what>\w+)/
  /UnpicklingError: (?:pickle data was truncated|unpickling stack underflow)/
  /WeightsUnpickler error: (?:\w+Error: )?(?:pickle data was truncated|unexpected|Unsupported
    operand \d+|invalid load key|Memo value not found|unpickling stack)/
  why: A kill amid the write, two writers, a full disk, or a download that was cut or is a web page
  fix: Use the checkpoint before it, or download again. Only rank 0 writes, then os.replace.
  case invalid load key, 'v' => The file is a pointer of git-lfs, not the file => git lfs pull.
  case invalid load key, '<' => The download brought a web page => Download it again, with a token.

checkpoint-many-writers: several ranks wrote, renamed or removed the same file or folder
  /\[Errno 17\] File exists: (?!'\/(?:psm_|torch_|sem\.|mp-|\d+_)\w*'$)/
  /\[Errno 17\] File exists: '\/\d{6}_\w+'/ /\[Errno 39\] Directory not empty/
  /No such file or directory: '[^']*(?:checkpoint|ckpt|tmp-)[^']*' -> '/
  why: Each rank runs the saving code; they meet at the same path
  fix: if rank == 0: torch.save(...), then dist.barrier(); os.makedirs(path, exist_ok=True). A cache
    of datasets: one process makes it first (main_process_first of Trainer and Accelerate).
  case exists: .\/\d{6}_\w+. => It is a block of shared memory: left by a killed run, or each rank
    takes itself for its node's first => ls /dev/shm;
    streaming.base.util.clean_stale_shared_memory(); LOCAL_RANK, LOCAL_WORLD_SIZE as torchrun sets.
  or_else: It is left over from an earlier run: then it is there before the start, too.

checkpoint-disk-full (likely): a disk or /dev/shm is full, or the quota is used up
  /^(?!.*file <.*torch_).*No space left on device(?!\. +joblib)/ /Disk quota exceeded/
  /unexpected pos \d+ vs \d+/ /PytorchStreamWriter failed writing file \S+: file write failed/
  why: Nothing more can be written there
  fix: df -h, df -i and quota -s show which; keep fewer checkpoints (ModelCheckpoint(save_top_k=2),
    save_total_limit=2 of Trainer); TMPDIR and HF_HOME on a larger disk.
  case unexpected pos|StreamWriter => Mostly a disk is full, or several ranks write the same file =>
    df -h, df -i, quota -s; keep fewer checkpoints; write on rank 0 only.
  case /dev/shm|[Mm]emory file system|/pymp-|/psm_|/sem\. => Shared memory (/dev/shm) is full =>
    docker run --shm-size=8g or --ipc=host, an emptyDir of medium Memory; fewer workers.

checkpoint-permission (likely): a path can't be written or read
  /^(?!.*mkdir -p failed).*\[Errno 13\] Permission denied:/ /\[Errno 30\] Read-only file system:/
  /Parent directory \S+ does not exist/
  why: Rights, a read-only mount, or a folder that is missing on this node
  fix: ls -ld of the folder as the job's user on that node; mkdir -p; another path.

checkpoint-optimizer: the optimizer's state does not fit its parameters
  /loaded state dict contains a parameter group that doesn't match the size/
  /loaded state dict has a different number of parameter groups/
  why: Parameters were frozen, added or grouped in another way than when it was saved
  fix: Freeze and group before the optimizer is made, as in the first run; or load the weights only.

checkpoint-sharded (accuses named, likely): a distributed checkpoint is incomplete, or laid out anew
  /CheckpointException ranks:(?:dict_keys\(\[(?P<ranks>[\d, ]+)\]\))?/ /CheckpointingException: /
  /global metadata read failed/ /assert metadata is not None/
  /Missing key in checkpoint state_dict: / /with shape torch\.Size\(\[0\]\) from checkpoint/
  /used a DP world size of \d+ but the current world size is \d+/
  /Size mismatch between saved torch\.Size/
  why: A rank failed while saving, files of a node are not on the shared disk, the model has other
    names, another number of ranks saved it, or one saved its part alone
  fix: All ranks write to one shared folder; load with the same model and sharding. Whole weights:
    torch.distributed.checkpoint.format_utils. DeepSpeed: zero_to_fp32.py; ds_to_universal.py.
"""

FAMILIES = read_families(_TEXT)
