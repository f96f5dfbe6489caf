// Helpers for a log, to which lines are appended.

/** Change a log. If its end is visible, it stays visible; if the user has scrolled back, the position stays. */
export function keptInView(log, change) {
  const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  change();
  if (atEnd) log.scrollTop = log.scrollHeight;
}

/** Turn a server's reason code, such as server_shutting_down, into words. */
export const inWords = (reason) => reason.replaceAll("_", " ");
