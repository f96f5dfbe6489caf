// A box in which lines are added at the end.

/** Change a log; whoever sees its end goes on seeing it, and whoever has scrolled back stays where they are. */
export function keptInView(log, change) {
  const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  change();
  if (atEnd) log.scrollTop = log.scrollHeight;
}

/** A server's reasons are codes, such as server_shutting_down. */
export const inWords = (reason) => reason.replaceAll("_", " ");
