"""The second lot: written with the first, and not looked at while the rules were made."""

from benchmarks.audit_cases.case import FINDS_UNUSED, HERE, UNEVEN_DATA, Case

HEALTHY = (
    Case("ZeRO", "tutorial", [
        ("    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)\n",
         "    from torch.distributed.optim import ZeroRedundancyOptimizer\n"
         "    optimizer = ZeroRedundancyOptimizer(\n"
         "        model.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-2)\n"),
    ]),
    Case("SyncBatchNorm is not for the CPU: GroupNorm", "vision",
         [("nn.BatchNorm2d(6)", "nn.GroupNorm(2, 6)")]),
    Case("a schedule with warm-up in a lambda", "tutorial", [
        ("torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=total_steps)",
         "torch.optim.lr_scheduler.LambdaLR(\n        optimizer,"
         " lambda s: min(1.0, (s + 1) / 5) * max(0.0, 1 - s / total_steps))"),
    ]),
    Case("OneCycle", "tutorial", [
        ("torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=total_steps)",
         "torch.optim.lr_scheduler.OneCycleLR(\n        optimizer, 1e-2, total_steps=total_steps)"),
    ]),
    Case("it stops early", "tutorial", [
        ("        loss = train_one", "        if epoch == 2:\n            break\n"
         "        loss = train_one"),
    ]),
    Case("warm restarts", "tutorial", [
        ("CosineAnnealingLR(optimizer, T_max=total_steps)",
         "CosineAnnealingWarmRestarts(optimizer, T_0=15)"),
    ]),
    Case("gradual unfreezing with new optimizers", "finetune", [
        ("    for epoch in range(3):\n",
         "    for epoch in range(3):\n        if epoch == 2:\n"
         "            for p in model.backbone[0].parameters():\n"
         "                p.requires_grad = True\n            ddp = DDP(model)\n"
         "            optimizer = torch.optim.AdamW(\n"
         "                [p for p in model.parameters() if p.requires_grad], lr=1e-4)\n"),
    ]),
    Case("BatchNorm stays in eval mode, the rest trains", "vision", [
        ("    model.train()\n    meter", "    model.train()\n    for m in model.modules():\n"
         "        if isinstance(m, nn.BatchNorm2d):\n            m.eval()\n    meter"),
    ]),
    Case("the last epoch freezes BatchNorm", "vision", [
        ("    model.train()\n    meter", "    model.train()\n    for m in model.modules():\n"
         "        if epoch == 1 and isinstance(m, nn.BatchNorm2d):\n            m.eval()\n"
         "    meter"),
    ]),
    Case("a discriminator every second step", "gan", [
        ("            optD.step()\n",
         "            if steps % 2 == 0:\n                optD.step()\n            steps += 1\n"),
        ("    for epoch in range(2):\n", "    steps = 0\n    for epoch in range(2):\n"),
    ]),
    Case("a gradient penalty", "gan", [
        ("            lossD.backward()\n",
         "            mixed = (0.5 * batch + 0.5 * fake.detach()).requires_grad_(True)\n"
         "            out = netD.module(mixed).sum()\n"
         "            (slope,) = torch.autograd.grad(out, mixed, create_graph=True)\n"
         "            (lossD + 0.1 * slope.pow(2).mean()).backward()\n"),
    ]),
    Case("a generator per rank", "diffusion", [
        ("    noise = torch.randn_like(x0)\n",
         "    noise = torch.randn(x0.shape, generator=source)\n"),
        ("    t = torch.randint(0, T, (len(x0),))\n",
         "    t = torch.randint(0, T, (len(x0),), generator=source)\n"),
        ("seed_everything(7 + rank)\n",
         "seed_everything(7)\n    global source\n"
         "    source = torch.Generator().manual_seed(50 + rank)\n"),
    ]),
    Case("a stream with workers", "stream", [("num_workers=0", "num_workers=2")]),
    Case("lines of a file, cut by rank", "stream", [
        ("            yield self.values[i], self.values[i].sum()\n",
         "            value = self.values[i] + 0.01 * torch.randn(10)\n"
         "            yield value, value.sum()\n"),
    ]),
    Case("own averages by one flat all-reduce", "by_hand", [
        ("    for p in model.parameters():\n        if p.grad is not None:\n"
         "            dist.all_reduce(p.grad)\n            p.grad /= world\n",
         "    grads = [p.grad for p in model.parameters()]\n"
         "    flat = torch.cat([g.flatten() for g in grads])\n    dist.all_reduce(flat)\n"
         "    flat /= world\n    start = 0\n    for g in grads:\n"
         "        g.copy_(flat[start : start + g.numel()].view_as(g))\n"
         "        start += g.numel()\n"),
    ]),
    Case("Join, and evaluation afterwards", "joined", [
        ("    if rank == 0:\n", "    model.eval()\n    with torch.no_grad():\n"
         "        error = F.mse_loss(model.module(x[:16]).squeeze(1), x[:16].sum(1))\n"
         "    dist.all_reduce(error)\n    if rank == 0:\n"),
        ("        with Join([model]):\n            for x, y in loader:",
         "        with Join([model]):\n            for a, y in loader:"),
        ("model(x).squeeze(1), y).b", "model(a).squeeze(1), y).b"),
    ]),
    Case("Join with ZeRO", "joined", [
        ("    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)\n",
         "    from torch.distributed.optim import ZeroRedundancyOptimizer\n"
         "    optimizer = ZeroRedundancyOptimizer(\n"
         "        model.parameters(), optimizer_class=torch.optim.SGD, lr=0.01)\n"),
        ("Join([model])", "Join([model, optimizer])"),
    ]),
    Case("loss times the world size, for a sum over all", "contrastive", [
        ("        return grad[dist", "        grad = grad / dist.get_world_size()\n"
         "        return grad[dist"),
        ("            loss.backward()\n"
         "", "            (loss * dist.get_world_size()).backward()\n"),
    ]),
    Case("spawn with accumulation", "spawn", [
        ("        loss.backward()\n", "        (loss / 1).backward()\n"),
    ], real=True),
    Case("own seeds per process", "accelerate", [
        ("set_seed(42)", "set_seed(42, device_specific=True)")]),
    Case("evaluation with torch's functions", "accelerate", [
        ("points(63, 1)", "points(64, 1)"), ("gather_for_metrics", "gather")]),
    Case("Fabric with no_backward_sync", "fabric", [
        ("            optimizer.zero_grad()\n            loss = F.cross_entropy(model(x), y)\n"
         "            fabric.backward(loss)\n            optimizer.step()\n",
         "            step += 1\n"
         "            with fabric.no_backward_sync(model, enabled=step % 2 == 1):\n"
         "                fabric.backward(F.cross_entropy(model(x), y) / 2)\n"
         "            if step % 2 == 0:\n                optimizer.step()\n"
         "                optimizer.zero_grad()\n"),
        ("    for epoch in range(2):\n", "    step = 0\n    for epoch in range(2):\n"),
    ]),
    Case("Lightning accumulates", "lightning", [
        ("max_epochs=2,", "max_epochs=2, accumulate_grad_batches=2,")]),
    Case("Trainer with warm-up and accumulation", "trainer", [
        ("num_train_epochs=2,", "num_train_epochs=2, warmup_steps=2, "
         "gradient_accumulation_steps=2,"),
    ]),
    Case("LBFGS", "by_hand", [
        ("torch.optim.SGD(model.parameters(), lr=0.01)",
         "torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)"),
        ("            optimizer.zero_grad()\n"
         "            loss = F.mse_loss(model(x).squeeze(1), y)\n"
         "            loss.backward()\n            average_gradients(model)\n"
         "            optimizer.step()\n",
         "            def closure():\n                optimizer.zero_grad()\n"
         "                loss = F.mse_loss(model(x).squeeze(1), y)\n"
         "                loss.backward()\n                average_gradients(model)\n"
         "                dist.all_reduce(shown := loss.detach().clone())\n"
         "                return shown / world\n            optimizer.step(closure)\n"),
    ]),
)  # fmt: skip
MISTAKES = (
    Case("evaluation's forward is trained through", "vision", [
        ("        output = model(images)\n        loss",
         "        output = model.module(images)" + HERE + "        loss"),
    ], ["gradients-not-averaged"], "not averaged"),
    Case("no_sync around the whole epoch", "stream", [
        ("        for x, y in loader:\n            loss = F.mse_loss(model(x).squeeze(1), y)\n"
         "            optimizer.zero_grad(set_to_none=True)\n            loss.backward()\n"
         "            optimizer.step()\n",
         "        with model.no_sync():" + HERE + "            for x, y in loader:\n"
         "                loss = F.mse_loss(model(x).squeeze(1), y)\n"
         "                optimizer.zero_grad(set_to_none=True)\n"
         "                loss.backward()\n                optimizer.step()\n"),
    ], ["gradients-not-averaged"], "not averaged"),
    Case("no wrap at all", "diffusion", [
        ("    model = DDP(net)\n",
         "    for p in net.parameters():\n        dist.broadcast(p.data, 0)\n    model = net\n"),
        ("model.module", "model"),
        ("    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)\n",
         "    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)" + HERE),
        ("    model = net\n", "    model = net" + HERE),
    ], ["gradients-not-averaged"], "not averaged"),
    Case("one rank scales its gradients", "tutorial", [
        ("        optimizer.step()\n",
         "        if dist.get_rank() == 1:\n"
         "            nn.utils.clip_grad_norm_(model.parameters(), 0.05)" + HERE
         + "        optimizer.step()\n"),
    ], ["gradients-not-averaged"], "not averaged"),
    Case("a sampler of rank 0 everywhere", "diffusion", [
        ("    sampler = DistributedSampler(dataset, seed=5)\n",
         "    sampler = DistributedSampler(dataset, num_replicas=2, rank=0, seed=5)" + HERE),
        ("    loader = DataLoader(dataset, batch_size=8, sampler=sampler)\n",
         "    loader = DataLoader(dataset, batch_size=8, sampler=sampler)" + HERE),
    ], ["same-samples"], "samples"),
    Case("another seed of the sampler on each rank", "gan", [
        ("    sampler = DistributedSampler(dataset)\n",
         "    sampler = DistributedSampler(dataset, seed=rank)" + HERE),
        ("    loader = DataLoader(dataset, batch_size=8, sampler=sampler, drop_last=True)\n",
         "    loader = DataLoader(dataset, batch_size=8, sampler=sampler, drop_last=True)" + HERE),
    ], ["samples-overlap"], "samples"),
    Case("workers repeat the stream", "stream", [
        ("    def __iter__(self):\n", "    def __iter__(self):" + HERE),
        ("range(self.rank * workers + worker, self.size, self.world * workers)",
         "range(self.rank, self.size, self.world)"),
        ("num_workers=0", "num_workers=2"),
        ("        info = torch.utils.data.get_worker_info()\n"
         "        worker, workers = (info.id, info.num_workers) if info else (0, 1)\n", ""),
    ], ["samples-repeated"], "samples"),
    Case("the framework's sampler is switched off", "lightning", [
        ("logger=False,", "logger=False, use_distributed_sampler=False,"
         "  # here\n       "),
        ("    train_loader = DataLoader(points(160, 0), 8, shuffle=True)\n",
         "    train_loader = DataLoader(points(160, 0), 8, shuffle=True)" + HERE),
    ], ["same-samples", "samples-overlap"], "samples"),
    Case("Fabric's loader is not set up", "fabric", [
        ("    train_loader, val_loader = fabric.setup_dataloaders(\n"
         "        DataLoader(train_set, 8, shuffle=True), DataLoader(val_set, 8))\n",
         "    train_loader = DataLoader(train_set, 8, shuffle=True)" + HERE
         + "    val_loader = fabric.setup_dataloaders(DataLoader(val_set, 8))\n"),
    ], ["same-samples", "samples-overlap"], "samples"),
    Case("set_epoch with a constant", "vision", [
        ("        sampler.set_epoch(epoch)\n", "        sampler.set_epoch(0)" + HERE),
        ("    for epoch in range(args.epochs):\n", "    for epoch in range(args.epochs):" + HERE),
    ], ["same-order"], "order of epochs"),
    Case("a sampler by hand with a fixed seed", "by_hand", [
        ("        sampler.set_epoch(epoch)\n", ""),
        ("    for epoch in range(2):\n", "    for epoch in range(2):" + HERE),
        ("    sampler = DistributedSampler(data)\n",
         "    sampler = DistributedSampler(data, shuffle=True)" + HERE),
    ], ["same-order"], "order of epochs"),
    Case("the reported loss goes backward", "diffusion", [
        ("            optimizer.zero_grad()\n            loss.backward()\n",
         "            dist.all_reduce(loss)" + HERE
         + "            loss /= dist.get_world_size()" + HERE
         + "            optimizer.zero_grad()\n            loss.backward()\n"),
    ], ["divided-twice"], "scale of the loss"),
    Case("averaged by a helper of another name", "gan", [
        ("            lossD.backward()\n",
         "            lossD = mean_over_ranks(lossD)" + HERE + "            lossD.backward()\n"),
        ("def main():\n    dist", "def mean_over_ranks(value):\n    dist.all_reduce(value)\n"
         "    return value / dist.get_world_size()" + HERE + "\n\ndef main():\n    dist"),
    ], ["divided-twice"], "scale of the loss"),
    Case("the loss is divided by the number of processes", "accelerate", [
        ("            accelerator.backward(loss)\n",
         "            accelerator.backward(loss / accelerator.num_processes)" + HERE),
    ], ["divided-twice"], "scale of the loss"),
    Case("a gathered loss of a differentiable all-reduce", "vision", [
        ("        loss = criterion(output, target)\n",
         "        loss = criterion(output, target)\n"
         "        loss = dnn.all_reduce(loss)" + HERE),
        ("import torch.distributed as dist\n",
         "import torch.distributed as dist\nimport torch.distributed.nn.functional as dnn\n"),
    ], ["scaled-by-world-size"], "scale of the loss"),
    Case("gradients are divided after DDP", "diffusion", [
        ("            optimizer.step()\n",
         "            for p in model.parameters():\n"
         "                p.grad /= dist.get_world_size()" + HERE + "            "
         "optimizer.step()\n"),
    ], ["divided-twice"], "scale of the loss"),
    Case("accumulation in Fabric without a division", "fabric", [
        ("            optimizer.zero_grad()\n            loss = F.cross_entropy(model(x), y)\n"
         "            fabric.backward(loss)\n            optimizer.step()\n",
         "            step += 1\n"
         "            with fabric.no_backward_sync(model, enabled=step % 2 == 1):\n"
         "                fabric.backward(F.cross_entropy(model(x), y))" + HERE
         + "            if step % 2 == 0:\n                optimizer.step()\n"
         "                optimizer.zero_grad()\n"),
        ("    for epoch in range(2):\n", "    step = 0\n    for epoch in range(2):\n"),
    ], ["accumulation-not-divided"], "accumulation"),
    Case("never zeroed", "stream", [
        ("            optimizer.zero_grad(set_to_none=True)\n", ""),
        ("            loss.backward()\n", "            loss.backward()" + HERE),
        ("            optimizer.step()\n", "            optimizer.step()" + HERE),
    ], ["gradients-not-zeroed"], "accumulation"),
    Case("objects are gathered with the padding", "vision", [
        ("Pictures(48, 1, False)", "Pictures(45, 1, False)"),
        ("    dist.all_reduce(hits)\n    dist.all_reduce(seen)\n    return (hits / seen).item()",
         "    both = [None] * args.world\n"
         "    dist.all_gather_object(both, (hits.item(), seen.item()))" + HERE
         + "    return sum(h for h, _ in both) / sum(s for _, s in both)"),
        ("    test_sampler = DistributedSampler(dataset_test, shuffle=False)\n",
         "    test_sampler = DistributedSampler(dataset_test, shuffle=False)" + HERE),
        ("    test_loader = DataLoader(dataset_test, 8, sampler=test_sampler)\n",
         "    test_loader = DataLoader(dataset_test, 8, sampler=test_sampler)" + HERE),
    ], ["evaluation-padded"], "metric of padded data"),
    Case("sums with the padding", "tutorial", [
        UNEVEN_DATA,
        ("    val_sampler = DistributedSampler(val_set, shuffle=False)\n",
         "    val_sampler = DistributedSampler(val_set, shuffle=False)" + HERE),
        ("    val_loader = DataLoader(val_set, batch_size=args.batch_size, sampler=val_sampler)\n",
         "    val_loader = DataLoader(val_set, batch_size=args.batch_size, sampler=val_sampler)"
         + HERE),
    ], ["evaluation-padded"], "metric of padded data"),
    Case("Fabric gathers with the padding", "fabric", [
        ("points(64, 1)", "points(63, 1)"),
        ("                hits += (model(x).argmax(-1) == y).sum()\n"
         "        hits = fabric.all_reduce(hits, reduce_op=\"sum\")\n"
         "        fabric.print(epoch, hits.item() / len(val_set))\n",
         "                right = (model(x).argmax(-1) == y).float().mean()\n"
         "                hits += fabric.all_gather(right).mean()" + HERE
         + "        fabric.print(epoch, hits.item() / len(val_loader))\n"),
        ("DataLoader(train_set, 8, shuffle=True), DataLoader(val_set, 8))\n",
         "DataLoader(train_set, 8, shuffle=True), DataLoader(val_set, 8))" + HERE),
    ], ["evaluation-padded"], "metric of padded data"),
    Case("eval() for a check within the epoch", "stream", [
        ("            optimizer.step()\n",
         "            optimizer.step()\n            if step == 5:\n"
         "                model.eval()" + HERE
         + "                with torch.no_grad():\n                    model(x)\n"
         "            step += 1\n"),
        ("    for epoch in range(2):\n", "    step = 0\n    for epoch in range(2):\n"),
        ("nn.Tanh()", "nn.Tanh(), nn.Dropout(0.1)"),
    ], ["train-mode-lost"], "train mode not restored"),
    Case("validate() returns too early", "vision", [
        ("    model.train()\n    meter", "    meter"),
        ("    criterion = nn", "    model.train()\n    criterion = nn"),
        ("    model.eval()\n", "    model.eval()" + HERE),
    ], ["train-mode-lost"], "train mode not restored"),
    Case("Fabric: train() before all epochs", "fabric", [
        ("        model.train()\n", ""),
        ("    for epoch in range(2):\n", "    model.train()\n    for epoch in range(2):\n"),
        ("        model.eval()\n", "        model.eval()" + HERE),
    ], ["train-mode-lost"], "train mode not restored"),
    Case("validation keeps BatchNorm in train mode", "vision", [
        ("    model.eval()\n", ""),
        ("        hits += (model(images).argmax(1) == target).sum()\n",
         "        hits += (model(images).argmax(1) == target).sum()" + HERE),
        ("def validate(args, model, loader):\n", "def validate(args, model, loader):" + HERE),
    ], ["evaluation-in-train-mode"], "evaluation in train mode"),
    Case("OneCycle of the undivided data", "tutorial", [
        ("    total_steps = args.epochs * len(train_loader)\n",
         "    total_steps = args.epochs * math.ceil(len(train_set) / args.batch_size)" + HERE),
        ("torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=total_steps)",
         "torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=total_steps)  # here"),
    ], ["schedule-too-long"], "schedule"),
    Case("a lambda of the undivided data", "diffusion", [
        ("    for epoch in range(epochs):\n",
         "    total = epochs * (len(dataset) // 8)" + HERE
         + "    schedule = torch.optim.lr_scheduler.LambdaLR(" + HERE
         + "        optimizer, lambda step: max(0.0, 1 - step / total))" + HERE
         + "    for epoch in range(epochs):\n"),
        ("            optimizer.step()\n", "            optimizer.step()\n"
         "            schedule.step()\n"),
    ], ["schedule-too-long"], "schedule"),
    Case("one step of the schedule per rank", "tutorial", [
        ("        scheduler.step()\n",
         "        for _ in range(dist.get_world_size()):" + HERE
         + "            scheduler.step()" + HERE),
        ("CosineAnnealingLR(optimizer, T_max=total_steps)\n",
         "CosineAnnealingLR(optimizer, T_max=total_steps)" + HERE),
    ], ["schedule-too-short"], "schedule"),
    Case("a share of one rank selects the model", "vision", [
        ("    dist.all_reduce(hits)\n    dist.all_reduce(seen)\n", ""),
        ("    for images, target in loader:\n        hits",
         "    for images, target in loader:" + HERE + "        hits"),
        ("        acc1 = validate(", "        acc1 = validate(" + HERE + "            "),
    ], ["evaluation-not-joined"], "metric of one rank's share"),
    Case("the main process evaluates its part", "accelerate", [
        ("            predictions, references = accelerator.gather_for_metrics((predictions, y))\n",
         "            references = y\n"),
        ("        for x, y in val_loader:\n", "        for x, y in val_loader:" + HERE),
    ], ["evaluation-not-joined"], "metric of one rank's share"),
    Case("equal noise by a seed in the epoch", "diffusion", [
        ("        sampler.set_epoch(epoch)\n",
         "        sampler.set_epoch(epoch)\n        torch.manual_seed(epoch)" + HERE),
    ], ["same-noise"], "equal random numbers"),
    Case("equal noise added to the inputs", "stream", [
        ("    torch.manual_seed(rank)\n", "    torch.manual_seed(0)" + HERE),
        ("            loss = F.mse_loss(model(x)",
         "            x = x + 0.1 * torch.randn_like(x)\n            loss = F.mse_loss(model(x)"),
    ], ["same-noise"], "equal random numbers"),
    Case("numpy augments alike", "vision", [
        ("        if self.train and random.random() < 0.5:\n            image = image.flip(-1)\n",
         "        if self.train:\n            image = image + np.float32(np.random.normal())\n"),
        ("    random.seed(args.rank)\n    torch.manual_seed(args.rank)\n",
         "    np.random.seed(0)" + HERE + "    torch.manual_seed(0)" + HERE),
    ], ["same-augmentation"], "equal random numbers"),
    Case("rank 0 changes the head after the wrap", "tutorial", [
        ("    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)\n",
         "    if rank == 0:\n        nn.init.zeros_(model.module.head.weight)" + HERE
         + "    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)\n"),
    ], ["weights-differ"], "weights"),
    Case("own average without the first broadcast", "by_hand", [
        ("    torch.manual_seed(0)\n", "    torch.manual_seed(rank)\n"),
        ("    for p in model.parameters():\n        dist.broadcast(p.data, src=0)\n", ""),
        ("    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)\n",
         "    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)" + HERE),
        ("    model = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 1))\n",
         "    model = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 1))" + HERE),
    ], ["weights-differ"], "weights"),
    Case("clipped before the average", "by_hand", [
        ("            average_gradients(model)\n",
         "            nn.utils.clip_grad_norm_(model.parameters(), 0.1)" + HERE
         + "            average_gradients(model)\n"),
    ], ["clipped-before-all-reduce"], "clipping"),
    Case("a layer without a use", "finetune", [
        ("        self.fc = nn.Linear(16, 3)\n",
         "        self.fc = nn.Linear(16, 3)\n        self.extra = nn.Linear(16, 3)" + HERE),
        FINDS_UNUSED,
        ("    optimizer = torch.optim.AdamW(head, lr=1e-3)\n",
         "    optimizer = torch.optim.AdamW(head, lr=1e-3)" + HERE),
    ], ["parameter-never-moves"], "parameters"),
    Case("an optimizer of the model before", "vision", [
        ("    model = DDP(build())\n",
         "    net = build()\n"
         "    optimizer = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9)" + HERE
         + "    model = DDP(build())\n"),
        ("    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, "
         "weight_decay=1e-4)\n", ""),
    ], ["parameter-not-in-optimizer"], "parameters"),
    Case("a log of all ranks in one file", "tutorial", [
        ("        if rank == 0:\n            print(",
         '        with open("log.txt", "w") as log:' + HERE
         + '            log.write(str(loss))\n        if rank == 0:\n            print('),
    ], ["same-file"], "files"),
    Case("a plateau of the own loss", "tutorial", [
        ("        scheduler.step()\n", ""),
        ("CosineAnnealingLR(optimizer, T_max=total_steps)",
         "ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)"),
        ("        acc = evaluate(model",
         "        scheduler.step(loss if rank else loss * (1 - epoch / 2))" + HERE
         + "        acc = evaluate(model"),
        ('"--epochs", type=int, default=3', '"--epochs", type=int, default=4'),
    ], ["learning-rates-differ"], "learning rates"),
    Case("statistics of a rank's own", "finetune", [
        ("        model.backbone.eval()\n", ""),
        ("find_unused_parameters=False)\n",
         "find_unused_parameters=False, broadcast_buffers=False)" + HERE),
    ], ["buffers-differ"], "buffers"),
    Case("a barrier for rank 0", "spawn", [
        ("        dist.barrier()\n", "        if rank == 0:\n            dist.barrier()" + HERE),
    ], ["collectives-differ", "hang"], "collectives", real=True),
    Case("uneven parts without Join", "joined", [
        ("        with Join([model]):\n            for x, y in loader:\n"
         "                optimizer.zero_grad()\n"
         "                F.mse_loss(model(x).squeeze(1), y).backward()\n"
         "                optimizer.step()\n",
         "        for x, y in loader:" + HERE + "            optimizer.zero_grad()\n"
         "            F.mse_loss(model(x).squeeze(1), y).backward()\n"
         "            optimizer.step()\n"),
        ("    data = Subset(", "    data = Subset(  # here\n        "),
        ("    loader = DataLoader(data, 8, shuffle=True)\n",
         "    loader = DataLoader(data, 8, shuffle=True)" + HERE),
    ], ["uneven-steps", "collectives-differ", "hang", "exception"], "collectives", real=True),
)  # fmt: skip
