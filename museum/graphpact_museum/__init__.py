"""The museum: real bugs of real engines, each planted in an otherwise correct plugin.

    bindings   binding, refresh and layout of metadata: GP01, 02, 07
    recordings recorded work and frozen host numbers: GP08, 10
    plans      plans, staging memory and host reads: GP09, 16, 20
    padding    contents and effects of padding rows: GP03 to 06
    memory     size, lifetime and sharing of memory: GP13 to 15, 18, 19
    runners    runners, the registry, capture sizes, batches, ranks: GP03 to 06, 11, 12, 17 and others
    drafts     runners that draft: GP01 to 03, 06
    drivers    graph drivers, fast and strict: GP01, 07, 08, 10, 14 to 16, 19 to 21
    life       recaptures, several lanes, rewritten batches and weights: GP02, 09, 10, 14 to 16, 19
    requests   requests that look like padding, and batches of other kinds: GP04, 06, 12
    neighbours   requests that take rows of other requests: GP05, and a correct one
    shapes     batches with the shape of another kind of step: GP02, GP12, and correct plugins near them
    segments   graphs with attention outside: GP01 to 03, 05, 08, 10, 15, and correct plugins of this kind
    scale      bugs that only unusual values of scale expose
    fields     optional fields of batches: GP02, 04, 05
    indices    padding rows and dummies that a consumer indexes with: GP04, 11
    host       host tensors of the view, and copies to the host: GP02 to 04, 16
    tasks      updates of tasks: GP21
    claims     declared invariants of plans, and layers that only read a KV cache: GP09 and others
    variants   correct plugins in other styles
    right_drivers   correct graph drivers in other styles

`exhibit` declares exhibits and variants. `edits` contains the functions that edit plugins. `collection`
lists all exhibits and variants, and `gallery` runs the suite on them.

The suite must catch every exhibit under its own rule, and pass every variant. A rule without an exhibit is
not trusted.

Does not: check plugins, because the museum checks the suite; or import a room, so that the command's help
is fast.
"""

ROOMS = (
    *("bindings", "recordings", "plans", "padding", "memory", "runners", "drafts", "drivers"),
    *("life", "requests", "whole_requests", "neighbours", "shapes", "segments", "scale", "fields"),
    *("indices", "host", "tasks", "python_state", "claims", "variants", "right_drivers"),
)
"""The modules and packages of exhibits and variants."""


def room_of(module: str) -> str:
    """Return the room of a module, by its full name."""
    return module.split(".")[1]
