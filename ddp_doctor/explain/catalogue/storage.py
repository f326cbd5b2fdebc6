"""Causes in what the data lies on: disks, network file systems, locks, downloads."""

from ddp_doctor.explain.events import Cause, Fix, Tier

CAUSES = (
    Cause(
        code="data-storage",
        title="the storage had an error",
        phrases=(
            r"\[Errno 5\] Input/output error",
            r"\[Errno 116\] Stale file handle",
            r"\[Errno 121\] Remote I/O error",
            r"\[Errno 112\] Host is down",
            r"Transport endpoint is not connected",
            r"nfs: server \S+ not responding",
            r"LustreError: ",
            r"blk_update_request: I/O error",
        ),
        tier=Tier.EXCEPTION,
        why="A disk or a network file system failed or was mounted anew while it was used",
        fix=Fix(
            plain="Check dmesg and the mount on that node; copy the data to a local disk; retry "
            "reads in __getitem__.",
            suite="such reads are retried, and counted",
        ),
        confirm="dmesg | grep -iE 'nfs|lustre|i/o error' on that node.",
        source="Linux errno",
        test="data_storage",
    ),
    Cause(
        code="data-lock",
        title="a file or database is locked by another process",
        phrases=(
            r"unable to lock file",
            r"\bLockError\b",
            r"database is locked",
            r"Timeout.*The file lock '(?P<what>[^']+)' could not be acquired",
        ),
        why="Several ranks or workers open it for writing, or the file system has no locks",
        fix=Fix(
            plain="Open it read-only, and in each worker itself, after the fork: h5py "
            "HDF5_USE_FILE_LOCKING=FALSE with mode 'r', lmdb.open(..., readonly=True, lock=False); "
            "let rank 0 write, then barrier; remove stale .lock files.",
        ),
        confirm="lsof or fuser of the file on that node; mount shows nolock for NFS.",
        source="HDF5, lmdb, sqlite3, filelock",
        no_test="needs these packages; composed from their texts",
    ),
    Cause(
        code="data-hub",
        title="a download failed",
        phrases=(
            r"We couldn't connect to '(?P<url>[^']+)'",
            r"HTTP Error (?P<status>\d+): ",
            r"Max retries exceeded with url",
            r"urlopen error",
            r"(?P<status>4\d\d|5\d\d) (?:Client|Server) Error",
            r"GatedRepoError",
            r"trying to access a gated repo",
        ),
        why="The node has no route to the internet, a token is missing, or many ranks asked at "
        "once",
        fix=Fix(
            plain="Download once on a machine with network, then HF_HUB_OFFLINE=1 and a shared "
            "HF_HOME; only rank 0 downloads, the others wait at a barrier; HF_TOKEN for gated "
            "repositories.",
            accelerate="with accelerator.main_process_first(): load_dataset(...)",
            trainer="with training_args.main_process_first(): load_dataset(...)",
            suite="download.py, then --no_download",
            lightning="download in prepare_data(), which runs on one rank first",
        ),
        confirm="curl of that address on the node.",
        source="huggingface_hub, urllib",
        test="data_hub",
    ),
)
