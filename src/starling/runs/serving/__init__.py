"""Serves a model: files over HTTP, microphones over a WebSocket, and a page for both."""
