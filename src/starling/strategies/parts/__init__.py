"""The building blocks of strategies. Each has one meaning and separate tests."""
