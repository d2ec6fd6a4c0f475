"""Both forms of the prototype, compiled for a Hopper and run on a CPU: prints as JSON what test_fp8_forms.py asserts.

In a process of its own, since TRITON_INTERPRET must not be set.  python tests/tools/fp8/emulated_forms.py TOKENS ...
"""

import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

import torch

from tools.compiled.ptx_machine import EmulationError, emulated
from tools.fp8.experts import Call, Sizes, random_matrices

# as few columns as there may be: a tile has more steps than the ring has stages
SIZES = Sizes(dim=1280, width=1152, num_experts=4, top_k=2)
CPU = torch.device("cpu")


def launch(call, matrices, is_few, is_hidden, block, edit=lambda ptx: ptx, seed=0):
    """One block of every expert: gate and up, or down."""
    num_blocks = SIZES.width // 128 if is_hidden else SIZES.dim // 256
    with emulated(seed) as emulation:
        emulation.edit, emulation.blocks = edit, ([block], num_blocks)
        (call.few if is_few else call.many)(matrices)[0 if is_hidden else 1]()


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
        found[f"equal {is_hidden}"] = all(torch.equal(*pair) for pair in zip(*kept, strict=True))
    found["pairs of experts"] = [int((call.experts == expert).sum()) for expert in range(SIZES.num_experts)]
    return found


def second_product_first(ptx):
    """The first two products of a chain change places."""
    pattern = r"(wgmma\.mma_async[^{]*\{[^}]*\}, )(\{[^}]*\})(, x, 0, 1, 1;\s*add\.u32 at, at, )2(;[^{]*\{at, 0x40000040\};\s*)" \
        r"(wgmma\.mma_async[^{]*\{[^}]*\}, )(\{[^}]*\})(, x, 1, 1, 1;\s*)add\.u32 at, at, 2;"  # fmt: skip
    swapped = r"add.u32 at, at, 2; mov.b64 x, {at, 0x40000040}; \g<1>\g<6>\g<3>-2\g<4>\g<5>\g<2>\g<7>add.u32 at, at, 4;"
    ptx, count = re.subn(pattern, swapped, ptx)
    assert count
    return ptx


def no_promotion(ptx):
    """Chains are not begun from zero."""
    ptx, count = re.subn(r"(wgmma\.mma_async[^;]*, x, )0, 1, 1;", r"\g<1>1, 1, 1;", ptx)
    assert count
    return ptx


def no_wait(ptx):
    ptx, count = re.subn(r"wgmma\.wait_group\.sync\.aligned 0;", "", ptx)
    assert count
    return ptx


def early_release(ptx):
    """MMA warps do not wait for a stage to be full."""
    ptx, count = re.subn(r"again: mbarrier[^;]*;\s*@!p bra again;", "", ptx)
    assert count
    return ptx


MISTAKES = second_product_first, no_promotion, no_wait, early_release


def planted():
    torch.manual_seed(0)
    call, matrices = Call.random(3, SIZES, CPU), random_matrices(SIZES, CPU)
    random_hidden(call)
    places = [(expert, 1, False) for expert in call.experts.unique().tolist()]
    found = {}
    for mistake in (lambda ptx: ptx, *MISTAKES):
        try:
            launch(call, matrices, True, False, 1, mistake)
            found[mistake.__name__] = call.wrong(matrices, places)["parts"]
        except EmulationError as error:
            found[mistake.__name__] = str(error)
    return found


if __name__ == "__main__":
    with torch.no_grad():
        result = {tokens: compared(int(tokens)) for tokens in sys.argv[1:] if tokens != "planted"}
        if "planted" in sys.argv:
            result["planted"] = planted()
    print(json.dumps(result))
