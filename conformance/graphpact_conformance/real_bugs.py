"""One real bug for each rule: the bug, its detection by the suite, the fix.

`graphpact explain GP03` and ``docs/explanation/bugs`` show these texts. Each bug has a public thread. Where
the thread reports no symptom, the text says so.

Does not: define rules (see `graphpact_conformance.rules`), or contain code with bugs
(see `graphpact_museum`).
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RealBug:
    """A real bug that breaks one rule. Each text is one paragraph of Markdown.

    Args:
        thread: Repository and number, such as ``sgl-project/sglang#26292``.
        url: Address of the thread.
        story: What was captured, what replay did, the symptom, and why the bug was hard to see.
        detection: How the suite detects such a bug without a GPU, and what the finding names.
        fix: What to change in a plugin.
    """

    thread: str
    url: str
    story: str
    detection: str
    fix: str


def _pull(thread: str, **texts: str) -> RealBug:
    return _of(thread, "pull", **texts)


def _issue(thread: str, **texts: str) -> RealBug:
    return _of(thread, "issues", **texts)


def _of(thread: str, kind: str, **texts: str) -> RealBug:
    repository, _, number = thread.partition("#")
    paragraphs = {part: " ".join(text.split()) for part, text in texts.items()}
    return RealBug(thread, f"https://github.com/{repository}/{kind}/{number}", **paragraphs)


REAL_BUGS: dict[str, RealBug] = {
    "GP01": _pull(
        "vllm-project/vllm#51994",
        story="""
        In DiffusionGemma a flag per request selects causal or bidirectional attention. vLLM stored it as
        bool, and its FlashAttention metadata cast it to int32 in every step. A cast allocates a new tensor.
        The graph had captured the address of the first one, so later steps filled tensors that no kernel
        read, and each slot kept the mask of the warm-up batch for the lifetime of the graph. Full graphs are
        the default there, and no error was raised. The author could not distinguish the damage from the
        model's own variation between two runs.
        """,
        detection="""
        The suite replays a batch that differs from the dummy of the capture, and compares the address of
        every tensor of view and metadata with the captured one. The finding names the field and the slot that
        owns it: `metadata.causal: address captured 0x.., got 0x..`. A tensor outside all slots is reported at
        capture.
        """,
        fix="""
        Declare the slot in the dtype that the kernel reads (`GraphSlot(..., dtype=torch.int32)`), take it
        from `buffers(name)` in `allocate_metadata`, and only `copy_` into it in `fill_metadata`: `copy_` also
        casts. Do not assign to a field of captured metadata. Pass `out=` to `cumsum`, `arange` and similar
        functions.
        """,
    ),
    "GP02": _pull(
        "sgl-project/sglang#22832",
        story="""
        SGLang's draft extend took its inputs from the static buffers of the decode graph. But a batch larger
        than all capture sizes decodes eagerly, and then those buffers hold an earlier step. The draft model
        read them, out of bounds, and the server crashed. As long as every batch fits a graph, the right
        tensors are the static ones, and the bug has no effect.
        """,
        detection="""
        The suite replays a batch twice, after different batches and over different poison, with batches that
        are too large for all capture sizes in between. An entry that holds the poison both times was not
        written. All other entries are compared with those that a capture of the same batch writes. Only
        entries that the replay reads count. The finding names the hook, the field, the entries and their
        values.
        """,
        fix="""
        Write the field in `fill_metadata`, in every mode, from the view alone; a backend with a second body
        for replays writes it in `refresh_metadata` too. Only slots of the role `constant` may be left out:
        their `contents` write them once, and no step does. Declare in the runner's
        `slots()` a slot for every tensor that a batch of the mode carries; a lane refuses a batch with any
        other tensor. Declare a slot with a `source_fn` for data from elsewhere, so that `populate` writes it
        in every step. Declare `optional=True` for a field that some batches lack; the slot then holds its
        initial value. Do not read buffers of another lane's graph: copy the outputs of its step, replayed or
        eager.
        """,
    ),
    "GP03": _pull(
        "sgl-project/sglang#26292",
        story="""
        A graph also replays batches that are smaller than its capture size, and then the last rows are
        padding. Four of SGLang's runners reset the lengths of those rows and forgot `req_pool_indices`, which
        kept the request rows of an earlier replay. So padding rows looked up the page table of requests that
        had ended, and read the memory that its entries still pointed to. No wrong answer was reported: a
        stale row is usually a valid address, and its output is cut off. A fifth runner already had the right
        line.
        """,
        detection="""
        The suite replays a large batch and then a smaller one in the same graph. Unowned entries of the page
        table hold slots out of range, and freed KV is NaN. A stale tail counts as soon as it is read, even if
        its values do no harm. The finding names the tail, such as `view.req_pool_indices[3:4]`, and its stale
        values.
        """,
        fix="""
        Declare `GraphSlot("req_pool_indices", ..., axis="bs", padding_policy=PaddingPolicy.ZERO)`: request
        row 0 is scratch. `build_decode_registry` declares it this way. A `populate` of your own calls
        `registry.fill_from(...)` with live and padded counts, and pads all other memory that it writes. In
        slots of a backend, `fill_metadata` writes every row of the view, including padding rows.
        """,
    ),
    "GP04": _issue(
        "vllm-project/vllm#43810",
        story="""
        vLLM pads slot mappings with -1, and its cache kernels skip negative slots. The path that stores
        hidden states (`extract_hidden_states`) called no such kernel: it indexed the cache with the slot,
        where -1 is the last entry of the last block. A drafter call of 64 tokens ran in a graph of 128 rows,
        and the 64 padding rows overwrote the real hidden state in physical slot 79. Nothing crashed. The bug
        shows only with a padded batch and a request in the last slot.
        """,
        detection="""
        The suite compares padding rows with the values that the backend declares as empty. After a replay the
        KV cache must be bitwise unchanged outside scratch and the slots of live tokens. The finding names the
        padding row, its value, and the KV slot that was written.
        """,
        fix="""
        A padding token writes scratch: declare `out_cache_loc` with `PaddingPolicy.ZERO`, and do not pad with
        -1, which may be used as an index. Declare a length of padding rows that your kernel handles:
        `Capabilities(seq_len_fill_value=...)`. Declare a field of your own with `PaddingPolicy.FILL_SENTINEL`
        and `pad_value=`. The pad value depends on the kernel that reads it; the value of another backend may
        be wrong.
        """,
    ),
    "GP05": _pull(
        "sgl-project/sglang#21452",
        story="""
        A piecewise graph of SGLang runs at a static number of tokens, and a smaller batch is padded to it:
        `q` has the static number of rows. FlashInfer's `qo_indptr` was built from the live requests and ended
        at the live tokens, so the two disagreed on the end of the step, and the output was wrong. A batch
        that fills its graph exactly has no padding and is right. The first version of the fix counted the
        missing tokens on the device and waited for the number; review asked for host numbers.
        """,
        detection="""
        The suite prepares batches that fill a shape exactly, lack one token and lack many, and compares all
        counts of the step: the last entry of each indptr with the rows of `q`, its length with the requests,
        sums with both. It does so in full graphs and in segments, where eager attention has metadata of its
        own. The finding names the field and both counts.
        """,
        fix="""
        Build offsets and sums from the view, which is padded. Where tokens are padded and requests are not,
        append a fake request that owns the padding tokens and has only page 0 (see `FakeRequest` in
        `plugins/flashinfer`). Count on the host, from `shape.num_tokens` and `extend_seq_lens_cpu`. Only
        `num_token_non_padded` counts live tokens. Where attention is an eager call, `eager_rows` declares
        whether the metadata counts padding tokens.
        """,
    ),
    "GP06": _issue(
        "vllm-project/vllm#57017",
        story="""
        vLLM captures decode at 1, 2, 4, 8 requests, so three are padded to four, the fourth with length 0.
        The Triton decode kernel divides by the sum of the weights, which is 0 for a row without keys: the
        padding row is NaN. Online FP8 experts then take one scale for the whole batch, and every request of
        DeepSeek-V2-Lite got NaN logits. One or two requests fill a graph exactly, eager runs have no padding,
        and layers with a scale per token keep the NaN in its row.
        """,
        detection="""
        The suite replays one batch over two different contents of the memory that padding rows read, one of
        them NaN. Live rows must be bitwise equal. The finding names the first live row that differs, and both
        values.
        """,
        fix="""
        Let the kernel give zeros for a row without keys, and write every row of its output: where it skips
        some, start from `torch.zeros_like(q)` and not from `empty`. Pass the number of live rows to work
        across rows (routing, an amax, the sampler): `build_decode_registry(enable_num_token_non_padded=True)`
        gives `view.num_token_non_padded`.
        """,
    ),
    "GP07": _pull(
        "sgl-project/sglang#21987",
        story="""
        In EAGLE's draft extend, capture laid out queries at a fixed stride: `cu_seqlens_q` was an `arange` in
        steps of `num_draft_tokens`. Replay packed them by `cumsum(accept_length + 1)`, while the draft model
        still ran on queries at the stride. Kernels read at wrong offsets; EAGLE gave NaN under graphs, and a
        server test failed each time. Where every draft is accepted the two layouts are equal. The same
        mistake had been fixed before in FlashInfer's `qo_indptr`, but not in `cu_seqlens_q`.
        """,
        detection="""
        The suite prepares a batch with unequal accepted lengths, zero among them, for replay, and also
        captures it, and compares both: shape, stride, dtype, and the values of offsets. The finding names
        `metadata.cu_seqlens_q`, with the values that capture and replay wrote for this batch.
        """,
        fix="""
        Where every request has the same number of tokens, offsets are `torch.arange(0, (bs + 1) * w, w,
        out=...)` with `w = view.tokens_per_request`, at capture and at replay: write it once, in
        `fill_metadata`. In a uniform mode nothing is packed by accepted lengths. One slot has one layout and
        one dtype; two layouts need two slots.
        """,
    ),
    "GP08": _pull(
        "huggingface/transformers#45323",
        story="""
        Continuous batching in transformers keyed graphs by the padded numbers of queries and keys.
        FlashAttention's varlen kernels also take `max_seqlen_k`, a Python number, which capture freezes as a
        launch argument. Two batches of equal padded size whose longest sequences differ shared a graph, and
        the second ran with the number of the first. GSM8K fell from about 0.45 to 0.23. How much it fell
        depended on the token budget, since it decides which batches share one graph.
        """,
        detection="""
        The suite replays batches that are far longer and far shorter than the dummy of the capture in one
        shape, and also captures each of them. Every host number of the metadata, and every one that is an
        argument of a recorded operation, must be equal or a declared bound. The finding names the number:
        `metadata.max_kv_len: bound captured <= 8, got 9`, or the argument and the line that passed it.
        """,
        fix="""
        Capture a kernel's limit with its largest value at any replay, from `self.context.limits` where
        `buffers.in_graph`, and declare it: `max_kv_len: int = graphpact.bounded()`. Put a number that selects
        a kernel or a grid into the key, `GraphShape(..., variant=...)`. Put a number that differs between
        batches into a tensor.
        """,
    ),
    "GP09": _pull(
        "NVIDIA/TensorRT-LLM#18769",
        story="""
        FlashInfer's decode kernel executes a schedule that `plan()` made on the host. A model that mixes
        sliding-window and full attention has one wrapper per window. TensorRT-LLM deferred the plans of
        several wrappers to the forward pass, which a replay does not run; the refresh before a replay also
        skipped them. Every replay ran the plan of the warm-up batch: one request of the longest length in
        slot 0, one-token requests elsewhere. Slot 0 had all its keys, so a batch of one looked right. Other
        requests attended to only a part of their keys.
        """,
        detection="""
        The suite replays a batch after two different histories. Some of the earlier batches differ from it in
        one thing (a length, a page). The plan must be the same both times, since it depends only on the
        batch. The finding names the field of the plan, with its values after both histories.
        """,
        fix="""
        Plan in `plan_metadata(view, metadata)`, which is called before every replay, from
        `view.seq_lens_cpu`, once for each wrapper that kernels read. Do not skip a plan by a cache key. Put
        the arguments of the plan into the metadata as host numbers: then the pact compares plan and kernel.
        """,
    ),
    "GP10": _pull(
        "sgl-project/sglang#26742",
        story="""
        DeepSeek V4's metadata in SGLang has two types: a raw one, and a full one that it is upgraded to.
        Layers used to do the upgrade on demand. When the buffers of all runners moved into one registry, the
        upgrade stayed in the capture path, and a piecewise replay ran only the other half. Review found it in
        the diff: at replay the layers would find the raw type, without the fields that they use. The bug
        needs one model, one kind of graph and one switch. The thread reports no wrong answer and no crash.
        """,
        detection="""
        The suite captures each batch, cold and after other phases. The recorded operations, and the type and
        fields of the metadata, must be those of the graph that replays the batch. That holds for the metadata
        of eager calls between segments too, which no graph reads. The finding names both types, or the first
        operation that differs, with its line.
        """,
        fix="""
        Return from `init_metadata_replay` the object that was captured, refreshed in place. The base class
        does this if you write only `fill_metadata`. If `fill_metadata` is only device work,
        `fill_is_device_only` records it in the graph. Host work of every step belongs in `plan_metadata`.
        Metadata of eager calls is made in every step: upgrade it in `init_metadata_eager`, in each call.
        Keep no state on `self` that an earlier phase may have filled, such as `if self._plan is None`.
        Python in a region runs only at capture: a counter that it advances, a slot that it chooses, or a list
        that it fills stays as it was there. Let tensors decide, or do it in a hook.
        """,
    ),
    "GP11": _pull(
        "sgl-project/sglang#22404",
        story="""
        With attention TP under DP a rank holds a share of the padded rows, and a count says how many of them
        are live, so that MoE layers route no padding. At replay SGLang wrote the count of this rank; at
        capture it wrote the number of tokens of all ranks. With a capture size of 1024 and two ranks, capture
        claimed 1024 live rows among 512. On one rank both counts are equal. No symptom was reported; the
        change makes capture compute the same count as replay.
        """,
        detection="""
        The dummy batch must pass the checks of a live batch. The suite then replays it as a live batch, as
        the only rank and as each of several: the hooks must write what they wrote at capture. The finding
        names the field, `num_token_non_padded`, with both numbers, or the contradiction in the dummy.
        """,
        fix="""
        Make capture a replay of `dummy(shape)`: `populate` has no branch for capture. The count of a rank is
        `compute_local_num_token_non_padded(count, context.padded_num_tokens)`, from the padded tokens of the
        shape, not from the batch. `build_decode_registry(enable_num_token_non_padded=True,
        require_gathered_buffer=True)` declares the slot; a runner passes both values on from its
        `RunnerContext`. In a test, `get_parallel().override(attn_tp_rank=1, attn_tp_size=2)` sets the rank of
        the `ParallelContext`.
        """,
    ),
    "GP12": _pull(
        "vllm-project/vllm#9285",
        story="""
        vLLM captured decode for sequences up to `max_seq_len_to_capture`; longer ones were to run eagerly. A
        typo in the condition on `max_decode_seq_len` broke this decision: longer sequences replayed graphs
        that were not captured for them, and crashed. Short sequences do not reach the limit. A reviewer asked
        for an assertion or a test against the next such typo.
        """,
        detection="""
        Only host work: the suite calls `fit` with batches on both sides of each limit (one less, equal, one
        more), and changes each attribute that a recorded kernel depends on separately. The finding names the
        batch, the shape that `fit` returned and the right one, or the reason that was not counted. A batch
        that a captured shape holds may run eagerly only with a reason in the runner's `declines`; the suite
        then checks that it does, and replays batches that are not declined.
        """,
        fix="""
        Choose with `CaptureSizes.fit`: the smallest shape that holds the batch. Check a limit of your own in
        `fit` and return an `EagerReason` of your own, which the class attribute `declines` lists and the lane
        counts. Put all else that a recorded kernel depends
        on (a length tier, a LoRA set) into the `variant` of the `GraphShape`. Declare only the
        `graph_support` that your kernels have. Compare `forward_mode`, not widths alone: a prompt, or a chunk
        of one, may have as many tokens as a verify has drafts.
        """,
    ),
    "GP13": _pull(
        "sgl-project/sglang#19016",
        story="""
        SGLang's NSA backend made the page table of its graphs as wide as the model's context: 202752 columns.
        Target verify needs a few more, for the sequence and the drafts after it. The request pool had room
        for them and this table did not, and a decode server died while copying 202754 columns into 202752.
        The bug needs a request within two tokens of the maximum length. A later issue found the same formula
        in several other backends.
        """,
        detection="""
        The suite prepares and replays steps at all limits at once: the most requests, the longest sequences
        with all their drafts, the largest top-k. The finding names the slot, its size, and the size that the
        step needs.
        """,
        fix="""
        Size `declare_slots(limits)` only by `limits`. A request has at most `limits.max_context_len` keys in
        its row of `req_to_token`, including drafts, on `limits.max_pages_per_request` pages. With top-k > 1
        drafts lie outside the row: `limits.draft.num_steps` more keys, and `limits.draft.topk` rows per
        request. Add one for an indptr, and take requests and tokens from the arguments of `shape_fn`.
        """,
    ),
    "GP14": _issue(
        "vllm-project/vllm#52540",
        story="""
        FlashInfer's cuDNN GEMMs shared a workspace of 32 MiB and grew it by `resize_()`, which frees the old
        memory. While vLLM captured its piecewise graphs, at 8 of 9, one GEMM's plan wanted 32 MiB and 256
        bytes. Every graph that had been captured kept the old address, and replayed into memory with other
        owners. The server crashed or hung under sustained load, and tracebacks named the readers of the
        corrupted memory. Another quantization of the model ran well, because it calls another GEMM; so the
        quantization was blamed.
        """,
        detection="""
        Between capture and replay the suite runs larger batches eagerly and captures other shapes. The strict
        tape holds only weak references to memory outside the graph, as a CUDA graph does. The finding names
        the slot or attribute, what happened to it (`was freed`, `moved from 0x.. to 0x..`, `shrank`), and the
        line that passed it to the graph.
        """,
        fix="""
        Declare the workspace at its largest size: `GraphSlot("acme.workspace", ..., axis="none",
        padding_policy=PaddingPolicy.FILL_ONCE, pad_value=0, copy_from_fb=False)`, and take it from
        `buffers(name)`. Do not `resize_` or replace a tensor that a graph uses, and do not keep it in a cache
        with eviction. Refuse a step that needs more.
        """,
    ),
    "GP15": _pull(
        "ROCm/aiter#5393",
        story="""
        A GEMM of aiter keeps its workspace and a counter in a cache, with the stream in the key. Capture runs
        on a fresh stream: its first GEMM misses, and allocates inside the capture, in the graphs' pool, where
        an earlier graph had just freed memory that its replays still write. A replay of that earlier graph
        corrupts the counter. A later graph then never counts its last part, and its output silently keeps old
        values. The graph with the cache miss resets the counter, since it recorded the zeroing: a test of a
        single graph finds nothing.
        """,
        detection="""
        The suite replays graphs alternately and in several orders, holds the outputs of one over the replay
        of another, and poisons the memory that a graph allocated in between. A wrong replay in segments runs
        once more with a copy of each result of attention: if it is right then, a later call overwrites that
        result. The finding names both shapes and the tensor: memory that another graph's capture allocated,
        or outputs that were overwritten.
        """,
        fix="""
        Allocate workspaces before capture: a slot of `declare_slots` with `axis="none"` and
        `PaddingPolicy.FILL_ONCE`, taken from `buffers(name)`. Fill no cache inside the region. Outputs belong
        to the graph: read them, or `clone()` them, before another graph replays, and return no view of them.
        After an `eager_call` into memory that all layers share, let the segment begin with a `clone()`.
        """,
    ),
    "GP16": _pull(
        "NVIDIA/TensorRT-LLM#14008",
        story="""
        In TensorRT-LLM's AutoDeploy, a step with EAGLE or MTP queued the copy of its sequence lengths to the
        GPU and continued. The next phase drafts one token per request, so the host set the same buffer to
        ones. If the copy had not run yet, it copied ones, and an extend of several tokens ran as if each
        request had one. QA found it on H20 GPUs with Llama 3.1 8B and Eagle3. If the copy finishes in time,
        the bug has no effect; the author suspects the same race as the cause of a flaky test.
        """,
        detection="""
        The strict tape runs `copy_async` as late as a device may, and refuses work of two streams on the same
        memory where neither waits. The suite prepares several steps in a row. The finding names the host
        buffer that changed before a wait for its copy, or the two operations without an order.
        """,
        fix="""
        Declare staging memory as a slot of the role `staging`. Copy it with
        `self.driver.copy_async(target, source)`, then `record()` an event from `self.driver.event()`, and
        `synchronize()` that event before the buffer is written again. Work on `self.driver.stream()` waits
        for the current stream first, and the current stream waits for it: `wait_stream`. The host reads or
        rewrites the target of a copy from the device only after an event behind that copy.
        """,
    ),
    "GP17": _pull(
        "sgl-project/sglang#37933",
        story="""
        SGLang let data-parallel ranks replay prefill graphs of different capture sizes. This is right as long
        as nothing in a graph depends on other ranks. Kimi-K3's first layer is dense, and gathers tokens over
        all ranks inside the graph. An idle rank ran eagerly and entered an all-reduce, a busy one replayed a
        reduce-scatter and an all-gather, and NCCL waited forever; with two capture sizes the gathers had
        unequal sizes. While all ranks are busy and replay the same shape, nothing goes wrong.
        """,
        detection="""
        The suite steps the ranks of a group together: busy, idle, of unequal sizes, one too large for all
        shapes. The sequence of collectives (operation, shape, group) must be the same on all. The finding
        names the step, the ranks, and the first collective that differs.
        """,
        fix="""
        Choose the shape from counts that all ranks know, not only from this rank's batch: where the batch
        carries `global_num_tokens_cpu`, `CaptureSizes.fit` takes the shape of the largest rank, also for a
        batch of mode `IDLE`. If one rank has to run eagerly, all ranks do. Sizes of recorded collectives come
        from the shape, and `global_num_tokens_gpu` is a slot that every fill writes.
        """,
    ),
    "GP18": _pull(
        "ROCm/aiter#4916",
        story="""
        A split-K GEMM of aiter counts its finished parts, and needs the counter at zero when it starts. aiter
        zeroed it once, at allocation. A graph records the launch and not that zeroing: once the counter had
        another value, no replay reset it, the reduction never ran, and the GPU spun forever. In a hung server
        132 waves waited for a counter that held 2. Without a disturbance the kernel itself leaves the counter
        at zero, and nothing goes wrong.
        """,
        detection="""
        The suite replays each graph several times on the same inputs. The results must be the same each time.
        The finding names the output, or the counter or flag, that differs between the replays.
        """,
        fix="""
        Reset counters and flags inside the region: `counter.zero_()` in `forward` is recorded, so every
        replay does it; in `__init__` it runs once. Draw random numbers only from the device's default
        generator, which a graph advances.
        """,
    ),
    "GP19": _pull(
        "ROCm/ATOM#2267",
        story="""
        A capture runs the model, so it writes the KV cache at the write indices. ATOM made dummy values for
        the inputs of a capture and did not set the write indices. At start they are zero, and row 0 is safe.
        After a sleep and a wake the graphs were captured again, with the indices of the last batch. Where the
        cache had shrunk, all eight replicas died of a memory fault. Elsewhere live slots were overwritten,
        and one NaN log probability spoiled a whole step of training.
        """,
        detection="""
        The suite saves KV cache and request pool before a capture and compares them bitwise after it, also
        for a repeated capture with a live batch in the slots. The finding names the KV slot or tensor that
        changed, and the captured shape. It also compares the state of the whole process around every call of
        the plugin: settings of torch, generators of random numbers, the working directory.
        """,
        fix="""
        Put `dummy(shape)` on scratch, request row 0 and KV slot 0 for every token, and run `populate` for it
        before each capture, including a repeated one: then all write indices are those of the dummy. Write
        state that a warm-up advances through an index that is scratch for padding rows, such as
        `mamba_track_indices`. Leave settings of torch to the program. Draw from a generator of the plugin.
        """,
    ),
    "GP20": _issue(
        "vllm-project/vllm#40807",
        story="""
        vLLM's TurboQuant attention declared that batches of several tokens per request can be captured. One
        of its branches, for continued prompts, calls `.tolist()` on device tensors, which a capture forbids.
        The dummy of a verify step has drafts after a prefix and enters that branch: with speculative decoding
        and chunked prefill, the engine died at start. Without them no capture enters the branch, and in an
        eager run the same read is legal.
        """,
        detection="""
        The suite records and replays every declared mode and draft width on the strict tape. A read of a
        device tensor on the host, a pageable copy, an unjoined stream or a seeding raises there. The finding
        names the line.
        """,
        fix="""
        Take lengths from the host twins of the view (`seq_lens_cpu`, `extend_seq_lens_cpu`) in
        `plan_metadata`, or keep the work on the device; set one element by `t[:1].zero_()` and not by `t[0] =
        0`. Compile, tune and allocate before the region. If a mode needs such work, declare less
        `graph_support`.
        """,
    ),
    "GP21": _pull(
        "vllm-project/vllm-ascend#10895",
        story="""
        On Ascend NPUs the lengths of attention are a list of the host, which a graph keeps by value. Before
        each replay vllm-ascend updates the recorded operator of every layer with new lengths. With sparse
        attention by Hamming distance, layers read only the blocks that were selected, so their lengths are
        shorter. The update of a replay passed the full lengths of the sequence to them. Eager steps passed
        the right ones. Only this attention together with full graphs was wrong, and only by less accurate
        answers.
        """,
        detection="""
        The strict tape holds every task to its rules: a missed update, a second one, another order, an
        unknown key, another graph's key, arguments of another layer's form, and an update that does not wait
        for the previous replay raise an error that names the task. Wrong values raise nothing. So the suite
        compares the arguments of every replay with those of the same batch in a new lane, and of a wrong
        replay with those of a capture of its batch. The finding names task and argument.
        """,
        fix="""
        Compute the arguments of a task in one function of view and layer, and use it in `forward`, which
        records the task, and in `init_metadata_replay`, which updates it. Loop over the layers in the order
        of the model. Take the graph's part of the key from the captured shape.
        """,
    ),
}
"""The text of every rule by its id, in the order of the rules."""
