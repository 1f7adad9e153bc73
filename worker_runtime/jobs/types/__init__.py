"""The types of jobs. What only one of them needs is imported when it runs, in its child process."""
