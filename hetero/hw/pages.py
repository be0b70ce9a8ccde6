"""Pages brought from the system before they are written: each once, by few threads.

A first write to fresh memory waits until the kernel has cleared the page. Threads that write to one huge page
at a time clear one each, and all but one are thrown away; and a read into fresh memory clears it before its
request is on its way to the disk.
"""

from __future__ import annotations

import ctypes
import os
import threading

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, since Linux 5.14
_UNIT = 2 << 20  # a huge page of most processors
_RUN = 4  # units of one call at most

# More threads clear no faster, and stand in the way of those that compute.
_turns = threading.BoundedSemaphore(max(1, min(4, os.cpu_count() or 1)))
_madvise = getattr(ctypes.CDLL(None), "madvise", None)


class Pages:
    """The pages of some private writable memory, which must be there while ``bring`` runs. Any thread may.

    Contents stay as they are, and so does the node that pages come from, which was said when the memory was
    made. A kernel that cannot help leaves pages to the first write.
    """

    def __init__(self, address: int, nbytes: int) -> None:
        """``address`` at a page, as a mapping begins."""
        self._address, self._nbytes = address, nbytes
        self._changed = threading.Condition()
        units = -(-nbytes // _UNIT)
        self._asked, self._there = bytearray(units), bytearray(units)

    def bring(self, offset: int, nbytes: int) -> None:
        """Have the pages from ``offset`` on, with those that share a huge page with them; what another thread
        is bringing already is waited for."""
        if _madvise is None or nbytes <= 0:
            return
        first, end = offset // _UNIT, -(-(offset + nbytes) // _UNIT)
        unit = first
        while unit < end:
            with self._changed:
                if self._asked[unit]:
                    unit += 1
                    continue
                stop = unit + 1
                while stop < min(end, unit + _RUN) and not self._asked[stop]:
                    stop += 1
                self._asked[unit:stop] = b"\1" * (stop - unit)
            start = unit * _UNIT
            size = min(stop * _UNIT, self._nbytes) - start
            try:
                with _turns:
                    _madvise(ctypes.c_void_p(self._address + start), ctypes.c_size_t(size), _POPULATE_WRITE)
            finally:
                with self._changed:
                    self._there[unit:stop] = b"\1" * (stop - unit)
                    self._changed.notify_all()
            unit = stop
        with self._changed:
            self._changed.wait_for(lambda: all(self._there[first:end]))
