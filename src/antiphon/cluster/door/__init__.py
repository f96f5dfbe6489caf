"""A door: a process without models that holds clients' connections and resumes their sessions at another host."""
