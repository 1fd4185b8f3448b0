"""MC2xx: faults that make ranks wait."""

from __future__ import annotations

from model_check.diagnose.catalogue.entry import Entry

_HISTORY = (
    "Each rank records every collective before it starts, with its number in the group. At the first number where the "
    "ranks differ, the majority, or a rank's own earlier steps, decide who left the order."
)

_BLAMED = {
    "majority": "the named ranks differ from most of the group",
    "history": "the named ranks left the order of their own earlier steps",
    "condition": "the call of the named ranks stands under a condition on the rank",
    "count": "the named ranks made another number of calls in a step than in earlier steps",
    "threads": "some ranks called it on a helper thread, the others on the main thread",
    "undecided": "nothing says which of the ranks is wrong, so all are named",
}
_LONELY = {"lonely_call": "the other ranks have ended, and the call of the named rank has no counterpart"}
_CALLS = {
    "op": "the collective that the named ranks called",
    "peers_op": "the one that the other ranks called at the same place of their order",
    "condition": "the condition on the rank around one of the calls",
}


def _calls_and(name: str, meaning: str) -> dict[str, str]:
    return _CALLS | {
        name: f"{meaning} of the named ranks' call",
        f"peers_{name}": f"{meaning} of the other ranks' call",
    }


HANGING: dict[str, Entry] = {
    "MC201": Entry(
        "collectives in a different order",
        "At the same place in their order, ranks of one group called different operations.",
        "Collectives are matched by order alone. An all_reduce never completes against a broadcast; both sides wait.",
        _HISTORY,
        (
            "call the same collectives in one order on all ranks; look for a branch on rank or data around the line",
            "iterate over sorted names, not over sets or dicts that were built in another order",
        ),
        "if rank == 1: dist.broadcast(x, 0); dist.all_reduce(y)\nelse: dist.all_reduce(y); dist.broadcast(x, 0)",
        causes=_BLAMED | {"groups": "the ranks made their process groups in different orders"},
        facts=_CALLS | {"groups": "of cause `groups`: the members of the group that each rank made"},
    ),
    "MC202": Entry(
        "shapes differ",
        "Ranks called the same collective with tensors of different size.",
        "One rank aborts on the unexpected size and its peers report a lost connection, or all wait.",
        _HISTORY + " Sizes are compared for operations that need equal sizes.",
        (
            "give the tensor one size on all ranks: pad to the largest, or gather the sizes first",
            "drop_last=True where the last batch is smaller on one rank",
        ),
        "dist.all_reduce(torch.zeros(10 if rank == 0 else 12))",
        causes=_BLAMED,
        facts=_calls_and("shape", "the shape"),
    ),
    "MC203": Entry(
        "dtypes differ",
        "Ranks called the same collective with tensors of different dtype.",
        "The backend does not look at the type. Where the sizes in bytes agree too, it adds bytes of different "
        "meaning: the result is garbage, and nothing stops. Where they differ, it may abort on the size, or wait.",
        _HISTORY + " Dtypes are compared whether anything hangs or not.",
        ("cast to one dtype before the collective: tensor.to(torch.float32)",),
        "loss = loss.half() if rank == 1 else loss\ndist.all_reduce(loss)",
        causes=_BLAMED,
        facts=_calls_and("dtype", "the dtype"),
    ),
    "MC204": Entry(
        "stuck in the data loader",
        "A rank waits for its next batch and the loader does not deliver one.",
        "__getitem__ or the sampler blocks: a file system that hangs, a lock, a network read, a deadlocked worker.",
        "The rank's open span is the loader's next; the line comes from the stack of the rank or of its loader worker.",
        (
            "look at the named line of __getitem__ or __iter__",
            "set DataLoader(timeout=…) so that a stuck worker becomes an error",
            "num_workers=0 shows the stack in the rank itself",
        ),
        "def __getitem__(self, i):\n    return read(self.paths[i])   # an NFS mount that hangs",
        ours=(
            "look at the named line, and at the file system under data.cache_dir",
            "training.num_workers=0 reads on the main thread, not on loader threads, so the main stack shows the line",
        ),
        causes={"rank": "the rank reads its samples itself", "worker": "the line is that of a loader worker"},
    ),
    "MC205": Entry(
        "uneven data or steps",
        "One rank ran out of batches, or of steps, while its peers still train.",
        "Its peers wait in the gradient reduction for a rank that has left the loop.",
        "The loader of the rank ended, or it is past the loop in which it made as many steps as its peers; they are in "
        "a collective that it did not start.",
        (
            "use DistributedSampler(drop_last=True), or shards of equal length",
            "agree on the number of steps before the epoch: all_reduce(MIN) of len(loader)",
            "with DDP: wrap the loop in torch.distributed.algorithms.join.Join",
        ),
        "dataset = files[rank::world]   # 1001 files on 2 ranks",
        ours=(
            "give every rank the same number of batches: data that you bring yourself is not cut into shards for you",
            "name the data in the configuration (data.dataset): each rank then gets as many batches as its peers",
        ),
        causes={"data": "its loader ended", "steps": "it left its loop before a loader had ended"},
        facts={
            "steps": "the number of steps that the first named rank completed",
            "op": "the collective that it has come to",
            "peers_op": "the one that the other ranks wait in",
        },
    ),
    "MC206": Entry(
        "a collective is missing on some ranks",
        "Some ranks call a collective (often a barrier) that others never call.",
        "A barrier or a gathering save stands under `if rank == 0`, or one rank skipped a step with `continue`.",
        _HISTORY + " A call that follows in the usual order means that the one before it was skipped.",
        (
            "move the collective out of the `if rank == 0` block: all ranks must call it",
            "instead of skipping a step on one rank, agree on it: all_reduce a flag, then all skip or none",
        ),
        "if rank == 0:\n    torch.save(state, path)\n    dist.barrier()   # the other ranks never get here",
        causes=_BLAMED
        | _LONELY
        | {"fewer_calls": "the named rank has ended, and the others still wait for a call of it"},
        facts=_CALLS,
    ),
    "MC207": Entry(
        "an extra collective on one rank",
        "One rank calls a collective that no other rank calls.",
        "Logging, evaluation or a gather in a branch that only this rank takes, or one more round of a loop.",
        _HISTORY + " A call that is not in the usual order, before the usual one, is extra.",
        (
            "let all ranks take part, or compute the value locally on this rank",
            "loop the same number of times on all ranks",
        ),
        "if rank == 0: dist.all_gather(norms, norm)   # for a log line",
        causes=_BLAMED | _LONELY,
        facts=_CALLS,
    ),
    "MC208": Entry(
        "crossed collectives",
        "Two collectives of the same size are called in swapped order on one rank: A then B here, B then A there.",
        "Nothing hangs and nothing fails: A is summed with B. Losses and gradients are wrong from then on.",
        "Call sites and source lines of the same numbers are compared; A against B and then B against A is a crossing. "
        "Different lines for the same statement in the branches of `if rank` are legal. Of FSDP2's gathers the modules "
        "are compared.",
        ("call them in one order on all ranks", "stack both values into one tensor and reduce it once"),
        "rank 0: all_reduce(loss); all_reduce(accuracy)\nrank 1: all_reduce(accuracy); all_reduce(loss)",
        causes=_BLAMED,
        facts=_calls_and("unit", "the gathered module"),
    ),
    "MC209": Entry(
        "stopped process",
        "The process of a rank is stopped by a signal and will not run until it is continued.",
        "SIGSTOP or SIGTSTP: Ctrl-Z, a debugger, a batch system that suspends jobs, a frozen container.",
        "The kernel reports state T for the process.",
        ("kill -CONT PID", "find out who stopped it"),
        "kill -STOP 4711",
    ),
    "MC210": Entry(
        "GIL held in C code",
        "A thread of the rank is inside C code and does not release the interpreter lock.",
        "An extension, ctypes.PyDLL, a regular expression that backtracks for ever. No other Python thread can run.",
        "Two looks at the stacks show the same thread with the GIL at the same line, outside any Python loop.",
        (
            "use ctypes.CDLL, which releases the GIL, for calls that block",
            "bound the input of the regular expression, or rewrite it without nested repeats",
            "run the call in a process of its own with a timeout",
        ),
        "re.match(r'^(\\w+\\s?)*$', text)   # exponential on some texts",
    ),
    "MC211": Entry(
        "lock deadlock",
        "A thread waits for a lock, a queue or another thread, and nothing will release it.",
        "Two threads take two locks in opposite order, one takes a plain Lock twice, or nobody fills a queue.",
        "The stacks of all threads: each place where one waits for a lock is named. A plain lock has no owner to ask.",
        (
            "take locks in one order everywhere",
            "use threading.RLock where a function that holds the lock calls another that takes it",
            "lock.acquire(timeout=…) turns the wait into an error",
        ),
        "with a: with b: …      # thread 1\nwith b: with a: …      # thread 2",
        causes={
            "locks": "several threads wait for locks that the others hold",
            "lock": "one lock is held, and no thread is about to release it",
            "thread": "the main thread waits for an item, an event or the end of another thread",
            "script_over": "the script is over, and a thread that is no daemon still runs",
        },
    ),
    "MC212": Entry(
        "livelock or busy loop",
        "A rank runs in a loop that never touches training again.",
        "A condition that never becomes true: polling for a file, a flag, another process.",
        "Several looks at the stacks show the same few lines in a loop without any recorded call, and CPU time is "
        "used. Lines that change, and a `for` loop over something that has an end, are work.",
        ("give the loop a deadline and an error", "look at the condition of the named loop: who should make it true?"),
        "while not os.path.exists(done): time.sleep(0.01)",
    ),
    "MC213": Entry(
        "stuck write",
        "A rank writes or opens a file and the kernel does not come back.",
        "A network file system without its server, a full pipe without a reader, a FIFO, a hung disk.",
        "Phase save or a writing line, no CPU time, no bytes moved, and the kernel waits in write, open or fsync.",
        (
            "check the file system: df, mount, dmesg",
            "where it is a pipe: look at who should read from its other end",
            "where it is a checkpoint: write it to a local disk first and copy it from there",
        ),
        "open('/mnt/nfs/ckpt.pt', 'wb')   # the server is gone",
    ),
    "MC214": Entry(
        "tracker or hub call stuck",
        "A rank is inside a network call to a hub, a tracker or another service.",
        "No network on the compute node, a proxy, a rate limit, a login prompt.",
        "Phase hub or tracker, or a stack inside huggingface_hub, wandb, requests, urllib or ssl.",
        (
            "HF_HUB_OFFLINE=1 or WANDB_MODE=offline on nodes without a network",
            "call the service on rank 0 only and give the call a timeout",
        ),
        "wandb.init(project='llm')   # behind a firewall that drops packets",
    ),
    "MC215": Entry(
        "waiting for standard input",
        "A rank reads from standard input, and nobody types.",
        "input(), a confirmation prompt of a library, or a forgotten breakpoint().",
        "Phase input, a read from descriptor 0, or a stack inside the debugger.",
        ("remove breakpoint() or input()", "pass --yes or its like, or redirect standard input from /dev/null"),
        "answer = input('overwrite? ')   # on rank 0",
        causes={"input": "something reads a line", "debugger": "the debugger waits for a command"},
    ),
    "MC216": Entry(
        "loader worker died",
        "A worker process of the data loader is gone.",
        "It was killed (often for memory or shared memory), crashed in native code, or called exit.",
        "torch's own error about a worker that exited, or a worker that is no longer among the rank's children.",
        (
            "look for the kernel's memory kills; lower num_workers or prefetch_factor",
            "enlarge /dev/shm (docker: --shm-size=16g)",
            "num_workers=0 shows the worker's error in the rank itself",
        ),
        "DataLoader(dataset, num_workers=16)   # in a container with 64 MB of /dev/shm",
    ),
    "MC217": Entry(
        "lost peer",
        "A rank that others wait for is gone, and how it ended is not known here.",
        "It ran on another host, or its end left no record.",
        "Peers report lost connections, and no rank whose files are here failed by itself.",
        ("look at the verdict or the log of the other hosts", "check the network between the hosts"),
        "[rank 3] Connection closed by peer [10.0.0.7]:31722",
    ),
    "MC218": Entry(
        "wait-for cycle",
        "Ranks wait for each other in a circle, in receives or in collectives of different groups.",
        "Each needs another one to move first.",
        "The graph of open receives and collectives has a circle, and every matching call is known to be absent. Where "
        "a rank waits inside a backward of DDP, or records were lost, a circle is only a warning. "
        "Named is the rank that left the order of its own earlier calls, names the wrong rank in a message, or is not "
        "in the call that most ranks are in; where none of that decides, all ranks of the circle are.",
        (
            "use batch_isend_irecv, or let even ranks send first and odd ranks receive first",
            "enter the groups in one global order on all ranks",
        ),
        "dist.recv(x, 1 - rank); dist.send(y, 1 - rank)   # on both ranks",
        causes={
            "left_its_order": "the named ranks came here by a call that they did not use to make at this place",
            "wrong_peer": "the named rank exchanges a message with a rank that does not expect it",
            "apart": "most ranks are in one collective, and the named ones are not",
            "undecided": "nothing says which of them is wrong, so all of them are named",
        },
        facts={"waits_in": "what each rank waits in"},
    ),
    "MC219": Entry(
        "no progress in user code",
        "A rank stands at one line of the script while the others wait for it. A warning as long as it may come back.",
        "A sleep, a subprocess that does not end, a blocking call, a read from a pipe that nobody writes to.",
        "It is the rank that nobody waits on behalf of; its stack names the line, and none of the special cases fits.",
        ("look at the named line", "give blocking calls a timeout: subprocess.run(…, timeout=60)"),
        "subprocess.run(['rsync', …])   # never returns",
        causes={
            "own_code": "it is somewhere in the code of the script or a library",
            "reading": "the kernel has it wait for data",
            "opening": "the kernel has it wait until a file is open",
            "file_lock": "the kernel has it wait for the lock of a file",
        },
        facts={"file": "what it reads, opens or locks", "children": "the commands of its child processes"},
    ),
    "MC220": Entry(
        "slow, but alive",
        "The job waits for one rank that is doing something legitimate and long.",
        "Saving, evaluating, compiling, loading on one rank while the others wait at a barrier.",
        "The open span of the rank that everybody waits for, a stack inside a compiler, or a sign of life in several "
        "looks: its lines change, it goes through a loop that has an end, it moves bytes. It is told as one line; a "
        "warning only where a rank shows no sign of life for a minute, or all ranks are inside one call.",
        (
            "nothing, if it ends",
            "save asynchronously or on all ranks; evaluate on all ranks",
            "raise the timeout of the process group if this takes longer than it",
        ),
        "if rank == 0: evaluate(model, all_of_it)   # 20 minutes\ndist.barrier()",
        causes={
            "at_work": "the named rank works, and the others wait for it",
            "one_call": "all ranks are in one call that does not end",
            "different_calls": "the ranks wait in different calls, and the records do not say which one is wrong",
        },
    ),
    "MC221": Entry(
        "different roots",
        "Ranks called the same broadcast, reduce, gather or scatter and named different roots (src or dst).",
        "A rank waits for a root that does not send, or nobody waits and the ranks go on with different values. `src` "
        "and `dst` are ranks of the whole job, also in a subgroup; group_src and group_dst count within the group.",
        _HISTORY + " The roots of the same number are compared, also where every rank came back from the call.",
        (
            "name one root on all ranks; the root of a subgroup is dist.get_global_rank(group, 0)",
            "look at how the named rank computes src or dst: local rank and global rank differ on several hosts",
        ),
        "dist.broadcast(settings, src=local_root)   # 0 here, 1 there",
        causes=_BLAMED,
        facts=_calls_and("root", "the root"),
    ),
    "MC222": Entry(
        "waits for a thread that failed",
        "The main thread of a rank waits in a queue, an event or a condition, and a helper thread of it has died.",
        "An exception ends only the thread that raised it. Whoever waits for its next item waits for ever.",
        "The thread's exception is on record, and after it the main thread stands in a wait between threads.",
        (
            "repair the named line; it is where the thread died",
            "let the thread hand its exception over (queue.put(error)) and raise it again in the main thread",
            "queue.get(timeout=…) turns the wait into an error",
        ),
        "batch = batches.get()   # the prefetching thread died of a KeyError",
        facts={"thread": "the thread that died", "exception": "the type of its exception"},
    ),
    "MC223": Entry(
        "different reductions",
        "Ranks called the same all_reduce, reduce or reduce_scatter with different operations (sum, max, …).",
        "Each rank reduces its share by its own operation. Nothing hangs and nothing fails; every result is wrong.",
        _HISTORY + " The operations of the same number are compared, also where every rank came back from the call.",
        ("pass one op on all ranks", "look for a branch on rank or data around the named line"),
        "dist.all_reduce(x, op=dist.ReduceOp.MAX if rank == 0 else dist.ReduceOp.SUM)",
        causes=_BLAMED,
        facts=_calls_and("reduction", "the reduction"),
    ),
}
