"""Accelerate, with the checkpoints of its example: save_state in step_N, skip_first_batches.

Its seedable sampler is on: without it the order of a resumed epoch is another one.
"""

from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils.data import DataLoader

from benchmarks.faults.task import Digits, build_optimizer, compute_loss, model, read_task


def main() -> None:
    """Train with an Accelerator, from the newest step_N if there is one."""
    task = read_task()
    options = DataLoaderConfiguration(
        use_seedable_sampler=True, use_stateful_dataloader=task.is_stateful
    )
    accelerator = Accelerator(cpu=True, dataloader_config=options)
    network = model()
    network, optimizer, loader = accelerator.prepare(
        network,
        build_optimizer(network),
        DataLoader(Digits(), task.batch_size, shuffle=True, num_workers=task.num_workers),
    )
    first_epoch, resume_step, num_steps = 0, 0, 0
    folders = sorted(task.output_dir.glob("step_*"), key=lambda path: path.stat().st_mtime)
    if folders:
        accelerator.load_state(str(folders[-1]))
        num_steps = int(folders[-1].name.removeprefix("step_"))
        first_epoch, resume_step = divmod(num_steps, len(loader))
    network.train()
    for epoch in range(first_epoch, task.num_epochs):
        active = loader
        loader.set_epoch(epoch)
        if epoch == first_epoch and resume_step and not task.is_stateful:
            active = accelerator.skip_first_batches(loader, resume_step)
            active.set_epoch(epoch)
        for batch in active:
            optimizer.zero_grad()
            loss = compute_loss(network(batch["images"], batch["ids"]), batch["labels"])
            accelerator.backward(loss)
            optimizer.step()
            num_steps += 1
            if num_steps % task.save_every == 0:
                accelerator.save_state(str(task.output_dir / f"step_{num_steps}"))
    accelerator.end_training()


if __name__ == "__main__":
    main()
