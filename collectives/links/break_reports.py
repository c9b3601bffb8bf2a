"""Which members report a dead member's broken links at once, and which only if they still must.

All links of a member that dies break together, and its master needs two reports to know that it has died
(``peer_sessions``). In a crowd of a thousand a thousand would say so. So some are chosen by a digest of both ids,
and the others wait until the view had the time to change: then the member is not in it any more, and there is
nothing to report.
"""

from __future__ import annotations

import zlib

# Expected; that fewer than two of a crowd are chosen happens once in half a million times.
REPORTS_AT_ONCE = 16
REPORT_LATER_S = 4.0  # a master of a crowd publishes a view within 2 s, see ``crowd_messages``


def reports_at_once(me: str, peer: str, members: int) -> bool:
    """Return whether this member reports at once that its link to another one broke.

    Args:
      members: in the view; up to ``REPORTS_AT_ONCE`` all of them do.
    """
    return zlib.crc32(f"{me} {peer}".encode()) % max(1, members) < REPORTS_AT_ONCE
