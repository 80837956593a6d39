"""An HTTP server at the user that speaks the OpenAI API and asks the parties: what a chat client connects to."""
