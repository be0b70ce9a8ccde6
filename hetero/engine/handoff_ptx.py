"""The kernels of the hand-off as PTX, which the driver compiles: neither nvcc nor Triton is needed.

``hetero_send``: copies up to three arrays of 32-bit words, either way between device and mapped host memory,
and with a flag sets it to 1 behind all of them; then the grid is one block. ``hetero_collect``: one thread
that waits for a flag, clears it, or gives up after a time and says at which layer. Orders: docs/handoff.md.
"""

from __future__ import annotations

ARRAYS = 3


def _copy(index: int) -> str:
    """Word i, i + threads of the grid, and so on, of one array. Loads and stores are of system scope: what
    the CPU wrote may not come from a cache, and what it will read is ordered by the fence."""
    return f"""
  ld.param.u64 %to, [to{index}];
  ld.param.u64 %from, [from{index}];
  ld.param.u32 %n, [words{index}];
  mov.u32 %i, %first;
COPY{index}:
  setp.ge.u32 %p, %i, %n;
  @%p bra COPIED{index};
  mul.wide.u32 %offset, %i, 4;
  add.u64 %at, %from, %offset;
  ld.relaxed.sys.global.u32 %word, [%at];
  add.u64 %at, %to, %offset;
  st.relaxed.sys.global.u32 [%at], %word;
  add.u32 %i, %i, %stride;
  bra COPY{index};
COPIED{index}:"""


_PARAMETERS = ",\n".join(
    f"  .param .u64 to{i}, .param .u64 from{i}, .param .u32 words{i}" for i in range(ARRAYS)
)

PTX = f"""
.version 6.3
.target sm_70
.address_size 64

.visible .entry hetero_send(
{_PARAMETERS},
  .param .u64 flag)
{{
  .reg .pred %p;
  .reg .u32 %i, %n, %first, %stride, %word, %block, %size, %thread;
  .reg .u64 %to, %from, %at, %offset, %flag;
  mov.u32 %block, %ctaid.x;
  mov.u32 %size, %ntid.x;
  mov.u32 %thread, %tid.x;
  mad.lo.u32 %first, %block, %size, %thread;
  mov.u32 %stride, %nctaid.x;
  mul.lo.u32 %stride, %stride, %size;
{"".join(_copy(i) for i in range(ARRAYS))}
  ld.param.u64 %flag, [flag];
  setp.eq.u64 %p, %flag, 0;
  @%p bra END;
  // One fence for all: what other threads copied is before the barrier, what other kernels wrote before them.
  bar.sync 0;
  setp.ne.u32 %p, %thread, 0;
  @%p bra END;
  mov.u32 %word, 1;
  st.release.sys.global.u32 [%flag], %word;
END:
  ret;
}}

.visible .entry hetero_collect(
  .param .u64 done, .param .u64 fault, .param .u32 layer, .param .u64 limit)
{{
  .reg .pred %p;
  .reg .u32 %value, %looks, %number;
  .reg .u64 %done, %fault, %limit, %start, %now;
  ld.param.u64 %done, [done];
  ld.param.u64 %fault, [fault];
  ld.param.u32 %number, [layer];
  ld.param.u64 %limit, [limit];
  mov.u64 %start, %globaltimer;
  mov.u32 %looks, 0;
LOOK:
  ld.acquire.sys.global.u32 %value, [%done];
  setp.eq.u32 %p, %value, 1;
  @%p bra FOUND;
  add.u32 %looks, %looks, 1;
  and.b32 %value, %looks, 1023;
  setp.ne.u32 %p, %value, 0;
  @%p bra LOOK;
  // An earlier layer of the step has waited the whole time already.
  ld.relaxed.sys.global.u32 %value, [%fault];
  setp.ne.u32 %p, %value, 0;
  @%p bra END;
  mov.u64 %now, %globaltimer;
  sub.u64 %now, %now, %start;
  setp.lt.u64 %p, %now, %limit;
  @%p bra LOOK;
  st.relaxed.sys.global.u32 [%fault], %number;
  bra END;
FOUND:
  mov.u32 %value, 0;
  st.relaxed.sys.global.u32 [%done], %value;
END:
  ret;
}}
"""
