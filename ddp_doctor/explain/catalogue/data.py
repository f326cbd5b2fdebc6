"""Causes in the data: datasets, DataLoader, workers, samplers, labels, storage, downloads."""

from ddp_doctor.explain.catalogue.entries import read_families

_TEXT = r"""
[Data]

data-worker-exited (generic): a DataLoader worker ended
  /DataLoader worker \(pid\(s\) [\d, ]+\) exited unexpectedly/
  /background workers are no longer alive/
  /DataLoader worker \(pid (?P<pid>\d+)\) (?:is killed by signal: (?!Term)\w+|exited)/
  why: Native code in the dataset crashed, the worker called exit, or it was killed
  fix: num_workers=0 shows the error; open files and databases in __getitem__, not in __init__.

data-worker-timeout (likely): a DataLoader worker did not deliver in time
  /DataLoader timed out after [\d.]+ seconds/
  why: Storage hangs, a lock was held at the fork, or a sample takes longer than the timeout
  fix: multiprocessing_context='spawn' or 'forkserver'; cv2.setNumThreads(0); a longer timeout=.

data-open-files: too many open files
  /Too many open files/ /received \d+ items of ancdata/
  /unable to open shared memory object <\S+ in read-write mode$/
  /Please increase the limit using `ulimit -n`/
  why: Each batch under way from a worker is an open file, and each that a dataset keeps open
  fix: ulimit -n 65536; torch.multiprocessing.set_sharing_strategy('file_system'); close files.

data-pickle: an object can't be pickled
  /Can't (?:pickle (?:<|local )|get local (?:object|attribute))/
  /[Cc](?:annot|an't) pickle '?[^'\n]+'? object/
  why: spawn sends the dataset, collate_fn and arguments to a new process, and torch.save of a whole
    model its hooks: lambdas, local functions, open files and locks can't be pickled
  fix: Define functions at the top of a module; functools.partial instead of lambda; open files
    lazily in __getitem__ and leave them out in __getstate__.
  case not the same object => Its name leads to another object: it was defined twice, or a decorator
    replaced it => Define it once, at the top of a module, under its own name.

data-collate (likely): the samples of a batch have different shapes or types
  /stack expects each tensor to be equal size, but got \[[^\]]*\] at entry \d+/
  /each element in list of batch should be of equal size/
  /Trying to resize storage that is not resizable/ /default_collate: batch must contain tensors/
  /Unable to create tensor, you should probably activate truncation and/or padding/
  why: default_collate stacks: it needs equal shapes. A sample is an outlier, or texts lack padding
  fix: A collate_fn that pads (rnn.pad_sequence), a transform that resizes all; .convert('RGB').

data-target-range: a label or index is out of range
  /Target -?\d+ is out of bounds/ /IndexError: index out of range in self/
  why: A label outside of the classes, a token id >= the embedding's rows, or a sequence too long
  fix: Labels from 0 to num_classes - 1; ignore_index for padding;
    model.resize_token_embeddings(len(tokenizer)); truncation to max_position_embeddings.

data-missing-file (generic): a file is not there
  /No such file or directory:/ /unable to open file <.*No such file/ /FileNotFoundError: /
  /ValueError: File \S+ not found/ /Couldn't find (?:file|a dataset script) at /
  why: The path is not on this node, or another rank has not written it yet, or has removed it
  fix: Same paths on all nodes (a shared disk, or a copy on each); rank 0 writes, then
    dist.barrier(), then the others read; os.makedirs(..., exist_ok=True).
  case _rmtree => Another rank removes the same folder at the same time => if rank == 0: remove it,
    then dist.barrier(); or shutil.rmtree(path, ignore_errors=True).
  case \.so'|torch_extensions => A compiled extension is not there: its build failed before, or
    another rank builds it => Read the first error of the build further up; build it on one rank.

data-bad-image (likely): a file of the dataset is broken
  /cannot identify image file / /LibsndfileError: (?!.*System error)/ /image file is truncated/
  /Unable to (?:synchronously )?open (?:file|object).*(?:truncated|signature not found)/
  /Parquet (?:magic bytes not found|file size is)/
  /ArrowInvalid: .*(?:orrupt|runcated|[Uu]nexpected|parse error|schema message|[Nn]ot an? Arrow)/
  why: A download or a copy was cut off, or the file is of another kind
  fix: Fetch the file again; check all once: for i in range(len(dataset)): dataset[i].

data-sampler (accuses nobody): sampler or shuffle was given where the loader takes none
  /sampler option is mutually exclusive with shuffle/
  /DataLoader with IterableDataset: expected unspecified (?:shuffle|sampler)/
  why: DistributedSampler shuffles by itself; an IterableDataset takes no sampler
  fix: DataLoader(dataset, sampler=DistributedSampler(dataset, shuffle=True)), no shuffle=, and
    sampler.set_epoch(epoch), if no framework does. Iterable: split in __iter__ by rank and worker.

data-empty: the dataset or this rank's part of it is empty
  /num_samples should be a positive integer value, but got num_samples=0/
  /Couldn't find any class folder in/ /Found no valid file for the classes/
  why: A wrong path, a filter that keeps nothing, or fewer samples than ranks
  fix: print(len(dataset)) on each rank before the loader is made.

data-uneven (mismatch, accuses named): a rank had fewer batches, and Join ended all of them
  /Rank (?P<ranks>\d+) exhausted all inputs/ /Detected at least one rank that exhausted inputs/
  why: model.join(throw_on_early_termination=True) raises on all ranks once one has no more batches
  fix: DistributedSampler(drop_last=True), or equal parts; or model.join() without that argument.

[Storage and downloads]

data-storage: the storage had an error
  /(?:\[Errno 5\]|failed with) Input/output error/ /nfs: server \S+ not responding/ /LustreError: /
  /\[Errno \d+\] (?:Stale file handle(?!.*triton)|Remote I/O error|Host is down)/
  /^(?!.*(?:gloo|ocket)).*Transport endpoint is not connected/ /blk_update_request: I/O error/
  why: A disk or a network file system failed or was mounted anew while it was used
  fix: Check dmesg and the mount on that node; copy the data to a local disk; retry reads.
  or_else: It is full (df -h, quota -s): some file systems say it like this.

data-lock (likely): a file or database is locked by another process
  /unable to lock file/ /\bLockError\b/ /database is locked/
  /Timeout.*The file lock '[^']+' could not be acquired/
  why: Several ranks or workers open it for writing, or the file system has no locks
  fix: Open it read-only, in each worker itself: h5py HDF5_USE_FILE_LOCKING=FALSE with mode 'r',
    lmdb.open(..., readonly=True, lock=False); rank 0 writes, then barrier; remove old .lock files.

data-hub (likely): a server (a hub, a storage) refused, or could not be reached
  /We couldn't connect to '[^']+'/ /outgoing traffic has been disabled/ /LocalEntryNotFoundError/
  /OfflineModeIsEnabled/ /is not a valid model identifier/ /HTTP Error \d+: / /urlopen error/
  /GatedRepoError/ /host='(?!localhost|0\.|10\.|127\.|192\.168\.)[^']*'.*Read timed out/
  /(?:Error: |host='(?!localhost|0\.|10\.|127\.|192\.168\.)[^']*'.*)Max retries exceeded with url/
  /[45]\d\d (?:Client|Server) Error(?!.*//(?:localhost|0\.|10\.|127\.|192\.168\.))/
  why: No route to the internet, no token, a wrong name (404), or many ranks that ask at once
  fix: Download once on a machine with network, then HF_HUB_OFFLINE=1 and a shared HF_HOME; only
    rank 0 downloads, the others wait at a barrier; HF_TOKEN for gated repositories.
  case create_repo|push_to_hub|init_hf_repo => A push to the hub failed, no download =>
    push_to_hub=False, or a token that may write and a network on this node.
  case Repository ?Not ?Found|valid model id => No such name, or it is private => Correct the name;
    HF_TOKEN.
  case \b[Gg]ated|GatedRepo|\b40[13] (?:Client|Forb|Unauth)|Error 40[13] => The server refuses this
    account or address => Check the name; accept the terms on its page; HF_TOKEN; or a mirror.
  case [Oo]ffline ?[Mm]ode|HF_HUB_OFFLINE|outgoing traffic|LocalEntry => It is not in the cache =>
    Download it once with network, to the same HF_HOME; unset HF_HUB_OFFLINE otherwise.
"""

FAMILIES = read_families(_TEXT)
