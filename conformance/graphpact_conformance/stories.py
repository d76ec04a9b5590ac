"""One real bug for each rule: what happened, how the suite sees such a thing, how it is mended.

`graphpact explain GP03` and ``docs/conformance.md`` tell them. Each is a public thread; where nobody reported
a symptom, the story says so.

Does not: define rules (`graphpact_conformance.rules` does), or plant bugs
(`graphpact_conformance.museum` does).
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Story:
    """A real bug of one rule's class. All text is one paragraph of Markdown.

    Args:
        thread: Repository and number, such as ``sgl-project/sglang#26292``.
        url: The same as an address.
        story: What was captured, what replay did, what was seen of it, and why it stayed unseen.
        seen: How the suite sees such a bug without a GPU, and what its finding names.
        mended: What to change in a plugin.
    """

    thread: str
    url: str
    story: str
    seen: str
    mended: str


def _pull(thread: str, **told: str) -> Story:
    return _of(thread, "pull", **told)


def _issue(thread: str, **told: str) -> Story:
    return _of(thread, "issues", **told)


def _of(thread: str, kind: str, **told: str) -> Story:
    repository, _, number = thread.partition("#")
    paragraphs = {part: " ".join(text.split()) for part, text in told.items()}
    return Story(thread, f"https://github.com/{repository}/{kind}/{number}", **paragraphs)


STORIES: dict[str, Story] = {
    "GP01": _pull(
        "vllm-project/vllm#51994",
        story="""
        A flag for each request says whether DiffusionGemma attends causally or both ways. vLLM kept it as
        bool, and its FlashAttention metadata cast it to int32 in every step; a cast makes a new tensor. The
        graph had captured the address of the first one, so later steps filled tensors that no kernel read,
        and each slot kept the mask of the warm-up batch for the life of the graph. Full graphs are the
        default there, and no error was raised. The author could not tell the damage from the model's own
        variation between two runs.
        """,
        seen="""
        A batch unlike the dummy of capture is replayed, and every tensor of view and metadata is held to the
        address that capture bound. The finding names the field and the slot that owns it:
        `metadata.causal: address captured 0x.., got 0x..`. A tensor that is no slot's is named at capture.
        """,
        mended="""
        Declare the slot in the dtype that the kernel reads (`GraphSlot(..., dtype=torch.int32)`), take it
        from `buffers(name)` in `allocate_metadata`, and only `copy_` into it in `fill_metadata`: `copy_`
        casts on the way. Assign nothing to a field of captured metadata; give `cumsum`, `arange` and their
        like an `out=`.
        """,
    ),
    "GP02": _pull(
        "sgl-project/sglang#22832",
        story="""
        SGLang's draft extend took its inputs from the static buffers of the decode graph. But that graph is
        not always what ran: a batch larger than every bucket decodes eagerly, and then those buffers hold
        some step of the past. The draft model read them, out of bounds, and the server crashed. As long as
        every batch fits a graph, the right tensors and the static ones are the same, and nothing shows.
        """,
        seen="""
        A batch is replayed twice, after other batches and over another garbage each time, with batches too
        large for any bucket in between. What still holds both garbages was written by nobody; the rest is
        compared with what a capture of that very batch writes. Only what the replay reads counts. The
        finding names the hook, the field, its entries, and what they hold.
        """,
        mended="""
        Write the field in `fill_metadata`, in every mode, from the view alone. The runner's `slots()` has a
        slot for every tensor that a batch of the mode carries; a lane refuses a batch with another. What
        comes from elsewhere becomes a slot with a `source_fn`, so that `populate` writes it each time; a
        field that some batches lack is declared `optional=True` and then holds its initial value. Never read
        buffers of another lane's graph: copy what its step returned, whichever way it ran.
        """,
    ),
    "GP03": _pull(
        "sgl-project/sglang#26292",
        story="""
        A graph captured for a bucket replays smaller batches, and their last rows are padding. Four of
        SGLang's runners reset the lengths of those rows and forgot `req_pool_indices`, which kept the
        request rows of an earlier replay. So padded rows looked up the page table of requests that were
        gone, and read wherever its entries still pointed. Nobody reported a wrong answer: a stale row is
        usually a valid address, and what it gives is cut off. A fifth runner had the right line all along.
        """,
        seen="""
        A large batch is replayed and then a smaller one in the same bucket, while page-table entries that
        no live request owns hold slots out of range and freed KV is NaN. A tail that is read counts,
        whether or not its values do harm. The finding names it, as `view.req_pool_indices[3:4]`, and what
        an earlier batch left there.
        """,
        mended="""
        Declare `GraphSlot("req_pool_indices", ..., axis="bs", padding_policy=PaddingPolicy.ZERO)`: request
        row 0 is all scratch. `build_decode_registry` has it so. A `populate` of your own calls
        `registry.fill_from(...)` with raw and padded counts, and what it writes besides it pads too. In
        slots of a backend, `fill_metadata` writes every row of the view, padded ones included.
        """,
    ),
    "GP04": _issue(
        "vllm-project/vllm#43810",
        story="""
        vLLM pads slot mappings with -1, and its cache kernels skip negative slots. The path that stores
        hidden states (`extract_hidden_states`) called no such kernel: it indexed the cache with the slot, and
        there -1 is the last place of the last block. A drafter call of 64 tokens ran in a graph of 128 rows,
        and the 64 padded ones overwrote the real hidden state in physical slot 79. Nothing crashed. It takes
        a padded batch and a request in the last slot to notice.
        """,
        seen="""
        Padded rows are held to what the backend declares as empty, and after a replay the KV cache has to be
        the same to the bit outside scratch and the slots of real tokens. The finding names the padded row,
        its value, and the KV slot that was written.
        """,
        mended="""
        A padded token writes scratch: `out_cache_loc` with `PaddingPolicy.ZERO`, and no -1 that somebody may
        use as an index. The length of a padded row is what your kernel reads as harmless:
        `Capabilities(seq_len_fill_value=...)`. A field of your own takes `PaddingPolicy.FILL_SENTINEL` and
        `pad_value=`. The value belongs to the kernel that reads it; what another backend pads with need not
        do.
        """,
    ),
    "GP05": _pull(
        "sgl-project/sglang#21452",
        story="""
        A piecewise graph of SGLang runs at a static number of tokens, and a smaller batch is padded up to it:
        `q` has the static number of rows. FlashInfer's `qo_indptr` was built from the real requests and ended
        at the real tokens, so the two disagreed on where the step ends, and output was wrong. A batch that
        fills its graph exactly has no padding and is right. The fix at first counted the missing tokens on
        the device and waited for the number; review asked for numbers of the host.
        """,
        seen="""
        Batches that fill a shape exactly, lack one token and lack many are prepared, and all that counts the
        step is added up: the last entry of each indptr against the rows of `q`, its length against the
        requests, sums against both. The finding names the field and both counts.
        """,
        mended="""
        Build offsets and sums from the view, which is padded. Where tokens are padded and requests are not,
        append a fake request that owns the padded tokens and whose every page is page 0 (`FakeRequest` in
        `plugins/flashinfer` is one). Count on the host, from `shape.num_tokens` and `extend_seq_lens_cpu`.
        Real tokens are counted by `num_token_non_padded` alone.
        """,
    ),
    "GP06": _issue(
        "vllm-project/vllm#57017",
        story="""
        vLLM captures decode at 1, 2, 4, 8 requests, so three are padded to four, the fourth with length 0.
        The Triton decode kernel divides by the sum of the weights, which is 0 for a row without keys: the
        padded row is NaN. Online FP8 experts then take one scale for the whole batch, and every request of
        DeepSeek-V2-Lite got NaN logits. One or two requests fill a graph exactly, eager runs pad nothing,
        and layers with a scale for each token keep the NaN where it is.
        """,
        seen="""
        One batch is replayed over two different contents of all that padding reads, one of them with NaN.
        Real rows have to be equal to the bit. The finding names the first real row that differs, and both
        values.
        """,
        mended="""
        Let the kernel give zeros for a row without keys, and write every row of its output: where it skips
        some, start from `torch.zeros_like(q)` and not from `empty`. What works on all rows at once (routing,
        an amax, the sampler) is told how many are real:
        `build_decode_registry(enable_num_token_non_padded=True)` gives `view.num_token_non_padded`.
        """,
    ),
    "GP07": _pull(
        "sgl-project/sglang#21987",
        story="""
        In EAGLE's draft extend, capture laid queries out at a fixed stride: `cu_seqlens_q` was an `arange` in
        steps of `num_draft_tokens`. Replay packed them by `cumsum(accept_length + 1)`, while the draft model
        still ran on queries at the stride. Kernels read at wrong offsets; EAGLE gave NaN under graphs, and a
        server test failed each time. Where every draft is accepted the two layouts are equal. FlashInfer's
        `qo_indptr` had been mended of the same mistake before; nobody had looked at its twin.
        """,
        seen="""
        A batch with unequal accepted lengths, zero among them, is prepared for replay and also captured
        anew, and the two are compared: shape, stride, dtype, and the values of offsets. The finding names
        `metadata.cu_seqlens_q`, with what capture writes for this batch and what replay wrote.
        """,
        mended="""
        Where every request brings as many tokens, offsets are
        `torch.arange(0, (bs + 1) * w, w, out=...)` with `w = view.tokens_per_request`, at capture and at
        replay: write it once, in `fill_metadata`. Nothing in a uniform mode is packed by accepted lengths.
        One slot has one layout and one dtype; users with two layouts are two slots.
        """,
    ),
    "GP08": _pull(
        "huggingface/transformers#45323",
        story="""
        Continuous batching in transformers kept graphs by the padded numbers of queries and of keys read.
        FlashAttention's varlen kernels also take `max_seqlen_k`, a Python number, which capture freezes as a
        launch argument. Two batches of equal padded size whose longest sequences differ shared a graph, and
        the second ran with the number of the first. GSM8K fell from about 0.45 to 0.23. How much it fell
        depended on the token budget, since that decides which batches meet in one graph.
        """,
        seen="""
        Batches far longer and far shorter than capture's dummy are replayed in one shape, and each is
        captured anew: every host number of the metadata, and every one that a recorded operation was given,
        has to be the same or a declared bound. The finding names the number: `metadata.max_kv_len: bound
        captured <= 8, got 9`, or the argument and the line that passed it.
        """,
        mended="""
        What a kernel takes as a limit, capture with the most that a replay may have, from
        `self.context.limits` where `buffers.in_graph`, and declare it:
        `max_kv_len: int = graphpact.bounded()`. What selects a kernel or a grid belongs into the key,
        `GraphShape(..., variant=...)`. What differs from batch to batch goes into a tensor.
        """,
    ),
    "GP09": _pull(
        "NVIDIA/TensorRT-LLM#18769",
        story="""
        FlashInfer's decode kernel works through a schedule that `plan()` made on the host. A model that mixes
        sliding-window and full attention has a wrapper for each window, and TensorRT-LLM put off the plans of
        several wrappers to the forward pass, which a replay never enters; the refresh before a replay skipped
        them too. Every replay ran the plan of the warm-up batch: one longest request in slot 0, one-token
        requests elsewhere. Slot 0 had all its keys, so a batch of one looked right, and other requests
        attended a part of theirs.
        """,
        seen="""
        A batch is replayed after two different histories, with neighbours among them that differ in one
        thing (a length, a page), and what is planned has to come out the same, since that batch alone
        decides. The finding names the field of the plan, with what it holds after one history and after the
        other.
        """,
        mended="""
        Plan in `plan_metadata(view, metadata)`, which is called before every replay, from
        `view.seq_lens_cpu`, once for each wrapper that kernels read. Keep no key that decides whether to plan
        again. Put the plan's arguments into the metadata as host numbers: then the pact holds plan and kernel
        to the same ones.
        """,
    ),
    "GP10": _pull(
        "sgl-project/sglang#26742",
        story="""
        DeepSeek V4's metadata in SGLang has two types: a raw one, and the full one that it is upgraded to.
        When the buffers of all runners moved into one registry, the upgrade, which layers had done when they
        needed it, stayed in what capture runs; a piecewise replay ran the other half alone. Review found it
        in the diff: at replay the layers would find the raw type, without the fields that they use. It takes
        one model, one kind of graph and one switch to get there. The thread shows neither an answer nor
        a crash.
        """,
        seen="""
        Each batch is captured anew, cold and after other phases ran: the operations that are recorded have
        to be those of the graph that replays it, and type and fields of the metadata too. The finding names
        both types, or the first operation that differs, with its line.
        """,
        mended="""
        Return from `init_metadata_replay` the object that was captured, refreshed in place; the base class
        does, where you write `fill_metadata` alone. Where that is device work alone, `fill_is_device_only`
        lets the graph do it; what the host has to do each time is `plan_metadata`. Keep nothing on `self`
        that an earlier phase may have filled, such as `if self._plan is None`.
        """,
    ),
    "GP11": _pull(
        "sgl-project/sglang#22404",
        story="""
        With attention TP under DP a rank holds a share of the padded rows, and a count says how many of them
        are real, so that MoE layers route no padding. At replay SGLang wrote the share of this rank; at
        capture it wrote the plain number of tokens, which is that of all ranks. With a bucket of 1024 and two
        ranks, capture claimed 1024 real rows among 512. On one rank both rules give the same number. No
        symptom was reported; the change makes capture compute what replay computes.
        """,
        seen="""
        The dummy batch has to pass the checks of a live one, and is then replayed as one, as the only rank
        and as each of several: the hooks have to write what they wrote at capture. The finding names the
        field, `num_token_non_padded`, with both numbers, or what contradicts itself in the dummy.
        """,
        mended="""
        Let capture be a replay of `dummy(shape)`: no branch of `populate` asks whether it captures. A
        rank's share is `compute_local_num_token_non_padded(count, context.padded_num_tokens)`, by the
        bucket and never by the batch; `build_decode_registry(enable_num_token_non_padded=True,
        require_gathered_buffer=True)` declares the slot, and a runner hands both on from its
        `RunnerContext`. `get_parallel().override(attn_tp_rank=1, attn_tp_size=2)` lets a test be any rank
        of a `ParallelContext`.
        """,
    ),
    "GP12": _pull(
        "vllm-project/vllm#9285",
        story="""
        vLLM captured decode for sequences up to `max_seq_len_to_capture`; longer ones were to run eagerly. A
        typo about `max_decode_seq_len` spoiled the test that decides it: longer sequences passed for
        captured, replayed graphs that were not made for them, and crashed. Short sequences never come near
        the limit. A reviewer asked for an assertion or a test that would catch the next one.
        """,
        seen="""
        Host work alone: batches on both sides of each limit (one less, equal, one more) are asked for their
        shape, and each attribute that a recorded kernel depends on is changed by itself. The finding names
        the batch, the shape that it got, and the one that it should have had, or the reason that was not
        counted.
        """,
        mended="""
        Choose with `CaptureSizes.fit`: the smallest shape that holds the batch. A limit of your own is a
        check in `fit`, which answers with an `EagerReason`, and the lane counts it. What else a recorded
        kernel depends on (a length tier, a LoRA set) is the `variant` of the `GraphShape`. Declare no more
        `graph_support` than your kernels have.
        """,
    ),
    "GP13": _pull(
        "sgl-project/sglang#19016",
        story="""
        SGLang's NSA backend made the page table of its graphs as wide as the model's context: 202752 columns.
        Verifying drafts needs a few more, for the sequence and the drafts behind it. The request pool had
        room for them and this table had not, and a decode server died copying 202754 columns into 202752. It
        takes a request within two tokens of the longest there is. A later issue found the same formula in
        several other backends.
        """,
        seen="""
        Steps at all limits at once are prepared and replayed: most requests, the longest sequences with all
        their drafts behind them, most branches. The finding names the slot, its size, and what the step
        needs.
        """,
        mended="""
        Size `declare_slots(limits)` by `limits` and nothing else. A request has at most
        `limits.max_context_len` keys in its row of `req_to_token`, drafts behind the sequence included, on
        `limits.max_pages_per_request` pages. Drafts that branch lie outside the row: `limits.draft.num_steps`
        keys more, and `limits.draft.topk` rows a request. Add one for an indptr, and take requests and tokens
        from the arguments of `shape_fn`.
        """,
    ),
    "GP14": _issue(
        "vllm-project/vllm#52540",
        story="""
        FlashInfer's cuDNN GEMMs shared a workspace of 32 MiB and grew it by `resize_()`, which frees the old
        memory. While vLLM captured its piecewise graphs, at 8 of 9, one GEMM's plan wanted 32 MiB and 256
        bytes. Every graph that was captured by then kept the old address, and replayed into memory that
        others owned. The server crashed or hung under sustained load, and tracebacks named those who read
        what was spoiled. Another quantization of the model ran well, because it calls another GEMM; so the
        quantization was blamed.
        """,
        seen="""
        Between capture and replay larger batches run eagerly and other shapes are captured. The strict tape
        holds foreign memory weakly, as a graph does. The finding names the slot or attribute, how it went
        (`was freed`, `moved from 0x.. to 0x..`, `shrank`), and the line that gave it to the graph.
        """,
        mended="""
        Declare the workspace at its largest size:
        `GraphSlot("acme.workspace", ..., axis="none", padding_policy=PaddingPolicy.FILL_ONCE, pad_value=0,
        copy_from_fb=False)`, and take it from `buffers(name)`. Never `resize_` or replace what a graph has
        seen, and keep no such tensor in a cache that evicts. A step that needs more is refused.
        """,
    ),
    "GP15": _pull(
        "ROCm/aiter#5393",
        story="""
        A GEMM of aiter keeps its workspace and a counter in a cache, with the stream in the key. Capture runs
        on a fresh stream: its first GEMM misses, and allocates inside the capture, in the graphs' pool, where
        an earlier graph had just freed what its replays still write. Replaying that earlier graph soils the
        counter; a later one then never sees its last part arrive, and its output silently keeps what it held.
        The graph that missed heals itself, since zeroing the counter was recorded in it: whoever tests a
        single graph finds nothing.
        """,
        seen="""
        Graphs are replayed in turn and in several orders, the outputs of one are held over the replay of
        another, and what a graph allocated is poisoned in between. The finding names both shapes and the
        tensor: memory that another graph's capture allocated, or outputs that no longer stand.
        """,
        mended="""
        Have scratch before capture: a slot of `declare_slots` with `axis="none"` and
        `PaddingPolicy.FILL_ONCE`, taken from `buffers(name)`; fill no cache inside the region. Outputs belong
        to the graph: read them, or `clone()` them, before another graph replays, and hand out no view.
        """,
    ),
    "GP16": _pull(
        "NVIDIA/TensorRT-LLM#14008",
        story="""
        In TensorRT-LLM's AutoDeploy, a step with EAGLE or MTP queued the copy of its sequence lengths to the
        GPU and went on. The next phase drafts one token a request, so the host set the same buffer to ones.
        Where the copy had not run yet it copied ones, and an extend of several tokens ran as if each request
        had one. QA met it on H20 GPUs with Llama 3.1 8B and Eagle3. Where the copy is done in time nothing
        happens; the author suspects the same race behind a flaky test.
        """,
        seen="""
        The strict tape runs `copy_async` as late as a device may, and refuses work of two streams on the same
        memory where neither waits; steps are prepared on end. The finding names the host buffer that changed
        before its copy was waited for, or the two operations that nothing orders.
        """,
        mended="""
        Staging memory is a slot with `device=torch.device("cpu")`. Copy it by
        `self.driver.copy_async(target, source)` and `record()` an event, made by `self.driver.event()`,
        behind it; `synchronize()` that event before the buffer is written again. Work on
        `self.driver.stream()` waits for the current stream first, and the current stream waits for it:
        `wait_stream`.
        """,
    ),
    "GP17": _pull(
        "sgl-project/sglang#37933",
        story="""
        SGLang let data-parallel ranks replay prefill graphs of different buckets, which is right as long as
        nothing in a graph depends on what other ranks have. Kimi-K3's first layer is dense, and gathers
        tokens over all ranks inside the graph. An idle rank ran eagerly and entered an all-reduce, a busy one
        replayed a reduce-scatter and an all-gather, and NCCL waited forever; with two buckets the gathers had
        unequal sizes. While all ranks are busy in one bucket, all is well.
        """,
        seen="""
        The ranks of a group go in lock step, busy, idle, in unequal buckets, one too large for any, and the
        sequence of collectives (operation, shape, group) has to be the same on all. The finding names the
        step, the ranks, and the first collective that differs.
        """,
        mended="""
        Choose the bucket from counts that all ranks know, never from the own batch alone: where the batch
        carries `global_num_tokens_cpu`, `CaptureSizes.fit` takes the bucket of the largest rank, and gives
        a batch of mode `IDLE` the same. Where one rank has to run eagerly, all do. Sizes of recorded
        collectives come from the shape, and `global_num_tokens_gpu` is a slot that every fill writes.
        """,
    ),
    "GP18": _pull(
        "ROCm/aiter#4916",
        story="""
        A split-K GEMM of aiter counts its parts as they finish, and needs the counter at zero when it starts.
        aiter zeroed it once, where it was allocated. A graph records the launch and not that zeroing: once
        the counter was left at another value, no replay set it back, the reduction never fired, and the GPU
        spun for good. In a hung server 132 waves waited for a counter that held 2. As long as nothing
        disturbs it, the kernel leaves the counter at zero itself, and all is well.
        """,
        seen="""
        Each graph is replayed several times on the same inputs and has to give the same each time. The
        finding names the output, or the counter or flag, that a later replay found otherwise than the first.
        """,
        mended="""
        Reset in the region what the region needs reset: `counter.zero_()` in `forward` is recorded, so
        every replay does it; in `__init__` it is done once. Draw random
        numbers from the device's default generator, which a graph advances, and from no other.
        """,
    ),
    "GP19": _pull(
        "ROCm/ATOM#2267",
        story="""
        Capturing a graph runs the model, so it writes the KV cache wherever the write indices point. ATOM
        made dummy values for what capture reads and left the write indices alone. At start they are zero, and
        row 0 is a safe place. After a sleep and a wake the graphs were captured again, with the indices of
        the last batch. Where the cache had shrunk meanwhile, all eight replicas died of a memory fault; where
        it had not, live slots were overwritten, and one NaN log probability spoiled a whole step of training.
        """,
        seen="""
        KV cache and request pool are kept before a capture and compared to the bit after it, also when it is
        repeated in mid-service, with the slots full of a live batch. The finding names the KV slot or tensor
        that changed, and the shape whose capture did it.
        """,
        mended="""
        `dummy(shape)` lies on scratch, request row 0 and KV slot 0 for every token, and goes through
        `populate` before each capture, a repeated one too: then every write index is the dummy's. State that
        a warm-up advances is written through an index that padding sends to scratch, such as
        `mamba_track_indices`.
        """,
    ),
    "GP20": _issue(
        "vllm-project/vllm#40807",
        story="""
        vLLM's TurboQuant attention declared that batches of several tokens a request can be captured. One of
        its branches, for prompts that continue, calls `.tolist()` on device tensors, which a capture forbids.
        The dummy of a verify step, whose drafts lie behind a prefix, is what enters that branch: with
        speculative decoding and chunked prefill on, the engine died while it started. Without them nothing
        captures the branch, and in an eager run the same read is legal.
        """,
        seen="""
        Every declared mode and draft width is recorded and replayed on the strict tape, where a read of a
        device tensor on the host, a pageable copy, an unjoined stream or a seeding raises. The finding names
        the line that did it.
        """,
        mended="""
        Take lengths from the host twins of the view (`seq_lens_cpu`, `extend_seq_lens_cpu`) in
        `plan_metadata`, or keep the work on the device; set one element by `t[:1].zero_()` and not by
        `t[0] = 0`. Compile, tune and allocate before the region. Where a mode cannot do without, declare less
        `graph_support`.
        """,
    ),
}
"""The story of every rule, by its id, in the order of the rules."""
