"""Causes that no message tells: they are seen in who ended, and in what the others lost."""

from ddp_doctor.explain.events import Blame, Cause, Fix, Tier

SILENT = Cause(
    code="stop-silent",
    title="a rank ended without an exception, and the others lost it",
    phrases=(),
    why="The launcher says that it ended with an error, and it printed none: sys.exit() or "
    "os._exit(), an exception that was caught and not printed, or its output went elsewhere",
    fix=Fix(
        plain="Read what it printed last; search the program for sys.exit, os._exit and broad "
        "except clauses; raise instead of exiting; torchrun --log-dir logs --tee 3.",
    ),
    confirm="python -X faulthandler -u; a breakpoint in sys.exit.",
    source="torch/distributed/elastic/multiprocessing/errors",
    no_test="seen in torchrun's own table: tests/explain/test_forms.py",
)
FINISHED = Cause(
    code="lost-finished-rank",
    title="a rank had finished while others still waited for it",
    phrases=(),
    tier=Tier.MISMATCH,
    blame=Blame.NOBODY,
    is_generic=True,
    why="The launcher lists no other failure than those that lost a connection: the rank at the "
    "other end had ended with status 0. It had fewer batches, or left its loop early",
    fix=Fix(
        plain="Equal numbers of batches: DistributedSampler(drop_last=True), or `with "
        "model.join():`; no break, return or sys.exit(0) that one rank alone takes.",
        lightning="use_distributed_sampler=True; limit_train_batches for iterable datasets",
        accelerate="accelerator.prepare(loader); accelerator.join_uneven_inputs([model])",
        trainer="TrainingArguments(dataloader_drop_last=True)",
        suite="uneven last windows need no setting",
    ),
    confirm="print(rank, len(loader)) on each rank, and a print after the loop.",
    source="torch/distributed/elastic/multiprocessing/errors, gloo/transport/tcp/pair.cc",
    no_test="seen in torchrun's own table: tests/explain/test_forms.py",
)
CAUSES = (SILENT, FINISHED)
