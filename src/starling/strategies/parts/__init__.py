"""The building blocks of methods, each with one meaning and tests of its own."""
