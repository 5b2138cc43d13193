"""The parts of which methods are made, each with one meaning and tests of its own."""
