"use strict";
// Starts `partita lsp` for .par files.
const { workspace } = require("vscode");
const { LanguageClient } = require("vscode-languageclient/node");

let client;

exports.activate = () => {
  const command = workspace.getConfiguration("partita").get("command");
  client = new LanguageClient("partita", "Partita", { command, args: ["lsp", "--stdio"] }, {
    documentSelector: [{ language: "par" }],
  });
  return client.start();
};

exports.deactivate = () => client && client.stop();
