"""Both forms of the prototype, compiled for a Hopper and run on a CPU: prints as JSON what test_fp8_forms.py asserts.

In a process of its own, since TRITON_INTERPRET must not be set.  python tests/tools/fp8/emulated_forms.py TOKENS ...
"""

import copy
import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

import torch

from tools.compiled.ptx_arithmetic import EmulationError
from tools.compiled.ptx_machine import emulated
from tools.fp8.experts import Call, Sizes, random_matrices
from tools.fp8.few import ROWS

# as few columns as there may be: a tile has more steps than the ring has stages
SIZES = Sizes(dim=1280, width=1280, num_experts=4, top_k=2)
ALL_SIGNS = 0x88888888 - 2**32
CPU = torch.device("cpu")


def unchanged(ptx):
    return ptx


def launch(call, matrices, is_few, is_hidden, block, edit=unchanged, seed=0, order=None):
    """One block of every expert: gate and up, or down."""
    num_blocks = SIZES.width // 128 if is_hidden else SIZES.dim // 256
    with emulated(seed) as emulation:
        emulation.edit, emulation.blocks = edit, ([block], num_blocks)
        (call.few if is_few else call.many)(matrices, order)[0 if is_hidden else 1]()


def random_hidden(call):
    codes = torch.randint(0, 256, call.hidden.shape, dtype=torch.int16)
    call.hidden.copy_(torch.where(codes & 127 == 127, 0, codes).to(torch.uint8).view(torch.int8))
    call.hidden_scale.copy_(torch.exp2(torch.randint(-8, 2, call.hidden_scale.shape).float()))


def compared(tokens):
    """How many results of each form are not the model's, and whether both forms leave the same bits."""
    torch.manual_seed(tokens)
    call, matrices = Call.random(tokens, SIZES, CPU, is_skewed=tokens > 2), random_matrices(SIZES, CPU)
    found, experts = {}, call.experts.unique().clamp_min(0).unique().tolist()
    for is_hidden in (True, False):
        block, kept = (tokens % 5 if tokens > 16 else 0), []  # without a sort, the first CTA leaves the order for down
        if not is_hidden:
            random_hidden(call)
        for is_few in (True, False):
            launch(call, matrices, is_few, is_hidden, block, seed=tokens)
            wrong = call.wrong(matrices, [(expert, block, is_hidden) for expert in experts])
            found[f"{'few' if is_few else 'many'}, {'hidden' if is_hidden else 'parts'}"] = wrong
            kept.append([part.clone() for part in ((call.hidden, call.hidden_scale) if is_hidden else (call.parts,))])
            for part in (call.hidden, call.hidden_scale) if is_hidden else (call.parts,):
                part.zero_()
        found["equal"] = found.get("equal", True) and all(torch.equal(*pair) for pair in zip(*kept, strict=True))
    found["pairs of experts"] = [int((call.experts == expert).sum()) for expert in range(SIZES.num_experts)]
    return found


# ---- planted mistakes ----


def second_product_first(ptx):
    """The first two products of a chain change places."""
    weights = r"(wgmma\.mma_async[^{]*\{[^}]*\}, )(\{[^}]*\})"
    pattern = (
        rf"{weights}(, x, 0, 1, 1;) add\.u32 at, at, 2; mov\.b64 x, \{{at, 0x40000040\}}; {weights}(, x, 1, 1, 1;) add"
    ).replace(" ", r"\s*")
    swapped = (
        r"add.u32 at, at, 2; mov.b64 x, {at, 0x40000040}; \1\5\3 sub.u32 at, at, 2; mov.b64 x, {at, 0x40000040}; "
        r"\4\2\6 add.u32 at, at, 2; add"
    )
    return changed(pattern, swapped, ptx)


def changed(pattern, replacement, ptx):
    ptx, count = re.subn(pattern, replacement, ptx)
    assert count, pattern
    return ptx


def no_promotion(ptx):
    """A chain goes on from the one before, in the tensor cores, and is all there is."""
    ptx = changed(r"(wgmma\.mma_async[^;]*, x, )0, 1, 1;", r"\g<1>1, 1, 1;", ptx)
    ptx = changed(r"fma\.rn\.f32([^;]*), %r\d+;", r"mul.rn.f32\1;", ptx)
    names = {name for outs in re.findall(r"mma_async\S* \{([^}]*)\}", ptx) for name in outs.split(", ")}
    zeros = "".join(f"mov.b32 {name}, 0;" for name in sorted(names))
    return changed(r"(mov\.u32 \s*%r1, %tid\.x;)", rf"\1 {zeros}", ptx)


def no_wait_for_products(ptx):
    return changed(r"wgmma\.wait_group\.sync\.aligned 0;", "", ptx)


def no_wait_for_stages(ptx):
    return changed(r"again: mbarrier[^;]*;\s*@!p bra again;", "", ptx)


MISTAKES = second_product_first, no_promotion, no_wait_for_products, no_wait_for_stages


def planted():
    """Of down, one expert, scales of 1: how many parts are wrong, or what the machine said. The last 128 columns take
    away what the first bring, which is large: so bits depend on the order of sums."""
    torch.manual_seed(0)
    call, matrices = Call.random(3, SIZES, CPU), random_matrices(SIZES, CPU)
    call.experts[:, 0], call.experts[:, 1] = 2, -1
    random_hidden(call)
    call.hidden_scale.fill_(1)
    down = matrices[2]
    down.data[:, :, -1], down.scale[:, :, -1] = down.data[:, :, 0] ^ ALL_SIGNS, down.scale[:, :, 0]
    call.hidden[:, -128:] = call.hidden[:, :128]
    found = {}

    def run(name, edit, given=call, third=down):
        given.parts.zero_()
        try:
            launch(given, [*matrices[:2], third], True, False, 1, edit, order=call.sort(ROWS))
            found[name] = call.wrong(matrices, [(2, 1, False)])["parts"]
        except EmulationError as error:
            found[name] = str(error)

    for mistake in (unchanged, *MISTAKES):
        run(mistake.__name__, mistake)
    call.hidden_scale[:, 0] = call.hidden_scale[:, -1] = 2.0**16
    run("large", unchanged)
    # the same products, of which the first 128 columns come last
    turned, other = copy.copy(call), copy.copy(down)
    turned.hidden, turned.hidden_scale = call.hidden.roll(-128, 1), call.hidden_scale.roll(-1, 1)
    other.data, other.scale = down.data.roll(-1, 2), down.scale.roll(-1, 2)
    run("first_step_last", unchanged, turned, other)
    return found


if __name__ == "__main__":
    with torch.no_grad():
        result = {tokens: compared(int(tokens)) for tokens in sys.argv[1:] if tokens != "planted"}
        if "planted" in sys.argv:
            result["planted"] = planted()
    print(json.dumps(result))
