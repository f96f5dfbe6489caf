"""A door: a process without models that holds client connections and resumes their sessions on another host."""
