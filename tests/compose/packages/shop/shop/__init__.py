"""A package of a job user, as the page on images has it: the tests of compose build it."""
