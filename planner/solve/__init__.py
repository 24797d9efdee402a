"""The search. The only place that knows OR-Tools; solver units (microseconds, nanoseconds) stay inside."""
