"""Logs of runs that ended well, with all that looks like a failure and is none."""
# ruff: noqa: E501  -- WHY: lines of logs stand here as they are

_BARS = "".join(
    f"\rEpoch 1:  {i}%|###       | {i}/100 [00:0{i % 10}<00:20, 4.1it/s, loss=0.{i}]"
    for i in range(10, 99)
)
_ADVICE = (
    "W1122 08:08:33.123000 99 torch/distributed/run.py:792] Setting OMP_NUM_THREADS environment "
    "variable for each process to be 1 in default, to avoid your system being overloaded"
)
_LIGHTNING = """GPU available: True (cuda), used: True
TPU available: False, using: 0 TPU cores
Initializing distributed: GLOBAL_RANK: 0, MEMBER: 1/8
----------------------------------------------------------------------------------------------------
distributed_backend=nccl
All distributed processes registered. Starting with 8 processes
----------------------------------------------------------------------------------------------------
LOCAL_RANK: 0 - CUDA_VISIBLE_DEVICES: [0,1,2,3,4,5,6,7]
  | Name  | Type   | Params | Mode
/env/lib/python3.11/site-packages/lightning/x.py:1: PossibleUserWarning: The dataloader does not have many workers
Epoch 9: 100%|##########| 100/100 [00:03<00:00, v_num=0]
`Trainer.fit` stopped: `max_epochs=10` reached.
"""
_UNUSED = (
    "[rank0]:[W1122 reducer.cpp:1400] Warning: find_unused_parameters=True was specified in DDP "
    "constructor, but did not find any unused parameters in the forward pass. This flag results in "
    "an extra traversal of the autograd graph every iteration, which can adversely affect "
    "performance. (function operator())"
)
_SLURM = """srun: job 4711 queued and waiting for resources
srun: job 4711 has been allocated resources
0: epoch 1 loss 0.3
1: epoch 1 loss 0.3
0: Training finished
"""

LOGS = {
    "progress bars": _BARS + "\n",
    "bars at the end of the line": _BARS.replace("\r", "\n") + "\n",
    "lightning": _LIGHTNING,
    "trainer": "{'loss': 0.41, 'grad_norm': 2.1, 'learning_rate': 2e-05, 'epoch': 0.9}\n"
    "{'eval_loss': 0.5, 'eval_runtime': 3.1, 'epoch': 1.0}\n{'train_runtime': 12.1, 'epoch': "
    "3.0}\n",
    "accelerate": "The following values were not passed to `accelerate launch` and had defaults used "
    "instead:\n\t`--num_processes` was set to a value of `2`\nepoch 0: {'accuracy': 0.84}\n",
    "torchrun's advice": _ADVICE + "\nepoch 1 loss 0.3\n",
    "unused parameters that are none": _UNUSED + "\nepoch 1 loss 0.3\n",
    "slurm": _SLURM,
    "error as a metric": "step 10 train_error 0.31 val_error=0.29 error: 0.30\n" * 50,
    "a metric called failed": "tests failed: 0, passed: 31\n",
    "nccl info": "node1:21:40 [0] NCCL INFO NET/IB : No device found.\n"
    "node1:21:40 [0] NCCL INFO Failed to open libibverbs.so[.1]\n"
    "node1:21:40 [0] NCCL INFO comm 0x55 rank 0 nranks 8 cudaDev 0 - Init COMPLETE\n",
    "process group left": "[rank0]:[W1122 08:08:33.1 ProcessGroupNCCL.cpp:1496] Warning: WARNING: "
    "destroy_process_group() was not called before program exit, which can leak resources.\n",
    "tokenizers": "huggingface/tokenizers: The current process just got forked, after parallelism has "
    "already been used. Disabling parallelism to avoid deadlocks...\n",
    "skipped steps": "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0\n",
    "dynamo": "W1122 08:08:33.1 99 torch/_dynamo/convert_frame.py:906] [0/8] torch._dynamo hit "
    "config.recompile_limit (8)\n",
    "barrier's device": "[rank0]:[W1122 08:08:33.1 ProcessGroupNCCL.cpp:4561] [PG ID 0 PG GUID 0 Rank 0] "
    " using GPU 0 to perform barrier as device used by this process is currently unknown. This can "
    "potentially cause a hang if this rank to GPU mapping is incorrect.\n",
    "a retried download": "WARNING:urllib3:Retrying (Retry(total=4)) after connection broken by "
    "'ReadTimeoutError': /x\nepoch 1 loss 0.3\nTraining complete\n",
    "exception that was ignored": "Exception ignored in: <function _f at 0x7f>\n"
    'Traceback (most recent call last):\n  File "/opt/env/lib/python3.11/x.py", line 3, in _f\n'
    "    f()\nOSError: handle is closed\nepoch 2 loss 0.2\nTraining finished\n",
    "optional package": "Could not import flash_attn: No module named flash_attn; using sdpa\n"
    "step 1 loss 3.0\n",
    "this suite": "08:00:00 epoch 1/1 | loss 0.31 | accuracy 91.20% | 12.1 s\n"
    "08:00:01 finished: 60 steps in 12 s; the best checkpoint is runs/first/checkpoints/best\n",
    "a step that was retried": "08:00:00 WARNING retrying step 4: rank 1, step 4, samples [3]: the loss "
    "is nan\n08:00:01 epoch 1/3 | loss 0.31\n",
    "deprecation": "/opt/env/lib/python3.11/site-packages/torch/x.py:1: FutureWarning: "
    "`torch.cuda.amp.autocast(args...)` is deprecated.\n  with torch.cuda.amp.autocast():\n",
    "deepspeed": "[2026-11-22 08:08:33,123] [INFO] [launch.py:351:main] Process 12 exits "
    "successfully.\n",
    "fsdp warnings": "[rank1]: /opt/env/lib/python3.11/site-packages/torch/distributed/fsdp/x.py:1: "
    "UserWarning: FSDP.state_dict_type() is being deprecated.\n[rank1]: step 3 loss 1.2\n",
    "c10d's retries": "[W1122 08:08:33.1 socket.cpp:767] [c10d] The client socket has failed to connect to "
    "[node0]:29500 (errno: 111 - Connection refused).\nepoch 1 loss 0.3\nepoch 2 loss 0.3\n",
    "an address that was taken, and another that was not": "[W1122 08:08:33.1 socket.cpp:464] [c10d] The "
    "server socket has failed to bind to [::]:29500 (errno: 98 - Address already in use).\n"
    "epoch 0 done\nepoch 1 done\n",
    "nccl's warning before it found a way": "n1:1:2 [0] misc/socket.cc:484 NCCL WARN socketStartConnect: "
    "Connect to 10.4.1.17<51235> failed : Connection refused\nstep 1 loss 0.3\nstep 2 loss 0.2\n",
    "told to stop, and saved": "step 100 loss 1.2\nReceived SIGTERM, saving\n"
    "checkpoint saved to /ckpt/step_101.pt, exiting gracefully\n",
    "a logged exception": "2026-11-22 08:08:33,123 ERROR could not read sample 81, skipping\n"
    'Traceback (most recent call last):\n  File "/x/data.py", line 3, in read\n    open_image(p)\n'
    "PIL.UnidentifiedImageError: cannot identify image file '/d/81.jpg'\n"
    "2026-11-22 08:08:34,123 INFO step 10 loss 0.3\n2026-11-22 08:09:34,123 INFO Training finished\n",
    "the store that ended first": "epoch 3 done\n[rank1]:[W1122 08:08:33.1 TCPStore.cpp:125] [c10d] recvValue "
    "failed on SocketImpl(fd=5, addr=[localhost]:4, remote=[localhost]:29500): failed to recv, got 0 bytes\n",
    "samples that tell of failures": "prompt: CUDA out of memory is a common error\n"
    "step 4 loss 3.1\nstep 5 loss 3.0\n",
    "an error of the profiler": "ERROR:2026-11-22 08:08:33 1:1 CuptiActivityProfiler.cpp:1243] CUPTI "
    "initialization failed\nepoch 1\nepoch 2\n",
    "a loader that is taken down": "step 10 loss 2.0\nterminate called without an active exception\n"
    "Exception ignored in: <function _Iter.__del__ at 0x7f>\nTraceback (most recent call last):\n"
    '  File "/opt/env/lib/python3.11/site-packages/torch/utils/data/dataloader.py", line 9, in __del__\n'
    "    self._shutdown_workers()\nAssertionError: can only join a child process\n"
    "step 11 loss 1.9\nstep 12 loss 1.8\n",
    "a restart that succeeded": '[rank1]: Traceback (most recent call last):\n[rank1]:   File "/x/t.py", line 3, in '
    "<module>\n[rank1]:     f()\n[rank1]: RuntimeError: flake\n"
    "E1122 08:08:33.1 9 torch/distributed/elastic/multiprocessing/api.py:826] failed (exitcode: 1) local_rank: 1 "
    "(pid: 13) of binary: python\nepoch 3 loss 0.2\nTraining complete\n",
    "addresses of Docker Desktop, and training in Chinese": "[W423 16:02:17.000000000 socket.cpp:752] [c10d] The "
    "client socket has failed to connect to [kubernetes.docker.internal]:55980 (system error: 10049).\n"
    "第1轮 损失=2.31 准确率=10.2%\n第2轮 损失=1.91 准确率=31.0%\n训练完成\n",
    "connections tried again, and training in German": "[W423 16:02:17.1 socket.cpp:752] [c10d] The client "
    "socket has failed to connect to [node0]:29500 (errno: 111 - Connection refused).\n"
    "Epoche 1: Fehler 0.31\nEpoche 2: Fehler 0.21\n",
}
