"""Routes in the form of other vendors' services, one module for each vendor."""
