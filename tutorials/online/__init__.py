"""Events, a trainer, a delta log, a server and a client: a loop that learns while it serves."""
