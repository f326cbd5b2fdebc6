"""The third lot, of frameworks alone: written later, not looked at while rules were made."""

from benchmarks.audit_cases.case import HERE, Case

OWN_TRAINER = """class MyTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = outputs["loss"]
        return (loss, outputs) if return_outputs else loss


def main():
"""
USES_OWN = (("def main():\n", OWN_TRAINER), ("trainer = Trainer(", "trainer = MyTrainer("))
HEALTHY = (
    Case("gradients are clipped by Fabric", "fabric", [
        ("            optimizer.step()\n",
         "            fabric.clip_gradients(model, optimizer, max_norm=1.0)\n"
         "            optimizer.step()\n"),
    ]),
    Case("Lightning clips", "lightning", [
        ("max_epochs=2,", "max_epochs=2, gradient_clip_val=1.0,"),
    ]),
    Case("manual optimization", "lightning", [
        ("        self.lr = lr\n",
         "        self.lr = lr\n        self.automatic_optimization = False\n"),
        ('        self.log("train_loss", loss)\n        return loss\n',
         "        optimizer = self.optimizers()\n        optimizer.zero_grad()\n"
         "        self.manual_backward(loss)\n        optimizer.step()\n\n"
         "    def on_train_epoch_end(self):\n        self.lr_schedulers().step()\n"),
    ]),
    Case("a schedule of steps", "lightning", [
        ("T_max=2)", "T_max=int(self.trainer.estimated_stepping_batches))"),
        ('"lr_scheduler": schedule}',
         '"lr_scheduler": {"scheduler": schedule, "interval": "step"}}'),
    ]),
    Case("a metric of torchmetrics", "lightning", [
        ("        self.lr = lr\n",
         "        self.lr = lr\n"
         "        from torchmetrics.classification import MulticlassAccuracy\n"
         "        self.accuracy = MulticlassAccuracy(3)\n"),
        ('        self.log("val_loss", F.cross_entropy(self.net(x), y), sync_dist=True)\n',
         '        self.accuracy(self.net(x), y)\n        self.log("accuracy", self.accuracy)\n'),
    ]),
    Case("the best model is loaded at the end", "trainer", [
        ('save_strategy="no"', 'save_strategy="epoch", load_best_model_at_end=True'),
    ]),
    Case("a cosine schedule, and so many steps", "trainer", [
        ("num_train_epochs=2,", 'max_steps=12, lr_scheduler_type="cosine",'),
    ]),
    Case("the last batch is dropped", "trainer", [
        ("Rows(128, 0)", "Rows(125, 0)"),
        ("num_train_epochs=2,", "num_train_epochs=2, dataloader_drop_last=True,"),
    ]),
    Case("a loss of its own", "trainer", USES_OWN),
    Case("an optimizer of its own", "trainer", [
        ("    trainer = Trainer(model=Net(), ", "    net = Net()\n    trainer = Trainer(\n"
         "        optimizers=(torch.optim.SGD(net.parameters(), lr=0.1), None), model=net, "),
    ]),
)  # fmt: skip
MISTAKES = (
    Case("Fabric's loss is divided by the world size", "fabric", [
        ("            fabric.backward(loss)\n",
         "            fabric.backward(loss / fabric.world_size)" + HERE),
    ], ["divided-twice"], "scale of the loss"),
    Case("all ranks save", "fabric", [
        ('    if fabric.is_global_zero:\n        torch.save(model.state_dict(), "fabric.pt")\n',
         '    torch.save(model.state_dict(), "fabric.pt")' + HERE),
    ], ["same-file"], "files"),
    Case("the loss is multiplied by the world size", "lightning", [
        ("        loss = F.cross_entropy(self.net(x), y)\n",
         "        loss = F.cross_entropy(self.net(x), y) * self.trainer.world_size" + HERE),
    ], ["scaled-by-world-size"], "scale of the loss"),
    Case("each rank saves the net after an epoch", "lightning", [
        ("    def validation_step",
         '    def on_train_epoch_end(self):\n        torch.save(self.net.state_dict(), "net.pt")'
         + HERE + "\n    def validation_step"),
    ], ["same-file"], "files"),
    Case("the optimizer knows the first layer only", "lightning", [
        ("torch.optim.Adam(self.parameters(), lr=self.lr)\n",
         "torch.optim.Adam(self.net[0].parameters(), lr=self.lr)" + HERE),
    ], ["parameter-not-in-optimizer"], "parameters"),
    Case("one rank's loss picks the best checkpoint", "lightning", [
        ("y), sync_dist=True)\n", "y))" + HERE),
        ("enable_checkpointing=False,",
         'callbacks=[L.pytorch.callbacks.ModelCheckpoint("best", monitor="val_loss")],'),
    ], ["evaluation-not-joined"], "metric of one rank's share"),
    Case("compute_loss multiplies by the world size", "trainer", [
        *USES_OWN,
        ('        loss = outputs["loss"]\n',
         '        loss = outputs["loss"] * dist.get_world_size()' + HERE),
    ], ["scaled-by-world-size"], "scale of the loss"),
    Case("compute_loss calls the inner module", "trainer", [
        *USES_OWN,
        ("        outputs = model(**inputs)\n",
         "        outputs = getattr(model, 'module', model)(**inputs)" + HERE),
    ], ["gradients-not-averaged"], "not averaged"),
    Case("all ranks save the final weights", "trainer", [
        ("    trainer.train()\n",
         '    trainer.train()\n    torch.save(trainer.model.state_dict(), "final.pt")' + HERE),
    ], ["same-file"], "files"),
    Case("an optimizer of the head only", "trainer", [
        ("    trainer = Trainer(model=Net(), ", "    net = Net()\n"
         "    head = torch.optim.SGD(net.net[3].parameters(), lr=0.1)" + HERE
         + "    trainer = Trainer(optimizers=(head, None), model=net, "),
    ], ["parameter-not-in-optimizer"], "parameters"),
)  # fmt: skip
