// A dropped log is uploaded with its progress shown, and the report equals that of the command.

import { execFileSync } from "node:child_process";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import os from "node:os";
import path from "node:path";
import { assert, drive } from "./browser.mjs";

const LINES = 60_000;
const HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>";
const POLICIES = ["token_bucket 100/1m burst 20", "fixed_window 600/1m"];
const BYTES_PER_SECOND = 2_000_000;

const directory = mkdtempSync(path.join(os.tmpdir(), "tallygate-log-"));
const log = path.join(directory, "access.log");
const user = (line) => (line % 3 === 0 ? HOSTILE : `user ${line % 500}`);
const lines = Array.from({ length: LINES }, (_, line) =>
  JSON.stringify({ time: 1_700_000_000 + Math.floor(line / 100), user: user(line), path: "/" }),
);
writeFileSync(log, `${lines.join("\n")}\n<b>this is no line</b>\n`);
const printed = execFileSync(process.env.TALLYGATE, [
  "backtest",
  "--json",
  "--key",
  "field:user",
  "--suggest",
  "99.9",
  ...POLICIES.flatMap((policy) => ["--policy", policy]),
  log,
]);
const expected = JSON.parse(printed);

const number = (text) => Number(text.replaceAll(/\s/g, ""));

try {
  await drive(
    async (page) => {
      const run = page.getByRole("button", { name: "Run" });
      assert.ok(await run.isDisabled());
      await page.locator("input[name=key]").fill("field:user");
      await page.locator("textarea[name=policies]").fill(POLICIES.join("\n"));
      // Drops the file, as a file manager does.
      const dropped = await page.evaluateHandle(
        async (text) => {
          const data = new DataTransfer();
          data.items.add(new File([text], "access.log"));
          return data;
        },
        `${lines.join("\n")}\n<b>this is no line</b>\n`,
      );
      await page.locator(".drop").dispatchEvent("drop", { dataTransfer: dropped });
      await page.locator(".drop", { hasText: "access.log" }).waitFor();

      const wire = await page.context().newCDPSession(page);
      await wire.send("Network.emulateNetworkConditions", {
        offline: false,
        latency: 0,
        downloadThroughput: -1,
        uploadThroughput: BYTES_PER_SECOND,
      });
      await run.click();
      await page.waitForFunction(() => {
        const { value } = document.querySelector("progress");
        return value > 0 && value < 1;
      });
      assert.match(await page.locator(".state").textContent(), /% sent$/);
      await page.locator(".state", { hasText: "60 001 lines read" }).waitFor();
      assert.equal(await page.locator("progress").evaluate((bar) => bar.value), 1);

      const rows = await page
        .locator("table", { hasText: "What each policy would have done" })
        .locator("tbody tr")
        .all();
      assert.equal(rows.length, expected.policies.length);
      for (const [index, row] of rows.entries()) {
        const cells = await row.locator("td").allTextContents();
        const { policy, allowed, denied, clients_denied: clients, suggestion } = expected.policies[index];
        assert.equal(cells[0], policy);
        assert.deepEqual(
          [1, 2, 4].map((cell) => number(cells[cell])),
          [allowed, denied, clients],
        );
        assert.ok(denied > 0, policy);
        assert.equal(cells[6], suggestion.policy ?? suggestion.reason);
      }
      const mostDenied = page.locator("table", { hasText: `Clients denied most by ${expected.policies[0].policy}` });
      assert.deepEqual(
        await mostDenied
          .locator("tbody tr")
          .first()
          .locator("td")
          .allTextContents()
          .then(([client]) => client),
        HOSTILE,
      );
      await page.locator("td", { hasText: "<b>this is no line</b>" }).waitFor();
      assert.equal(
        await page.evaluate(
          () => document.querySelectorAll("#backtest script, #backtest img, #backtest b").length,
        ),
        0,
      );
      assert.ok((await page.locator(".results canvas").boundingBox()).width > 600);
    },
    { address: "#backtest" },
  );

  // The file is chosen by keyboard, and the upload is stopped.
  await drive(
    async (page) => {
      await page.locator("input[name=log]").setInputFiles(log);
      const wire = await page.context().newCDPSession(page);
      await wire.send("Network.emulateNetworkConditions", {
        offline: false,
        latency: 0,
        downloadThroughput: -1,
        uploadThroughput: BYTES_PER_SECOND / 10,
      });
      await page.getByRole("button", { name: "Run" }).press("Enter");
      await page.waitForFunction(() => document.querySelector("progress").value > 0);
      await page.getByRole("button", { name: "Stop" }).press("Enter");
      await page.locator(".backtest .problem", { hasText: "stopped" }).waitFor();
      assert.ok(await page.getByRole("button", { name: "Run" }).isEnabled());
    },
    { address: "#backtest", mayFail: /v1\/backtest/ },
  );

  // Filters select lines.
  await drive(
    async (page) => {
      await page.locator("input[name=log]").setInputFiles(log);
      await page.locator("input[name=key]").fill("field:user");
      await page.locator("textarea[name=policies]").fill("fixed_window 139/1m, gcra 1000/1s");
      await page.locator("input[name=where]").fill("user=user *");
      await page.getByRole("button", { name: "Run" }).click();
      await page.locator(".results p", { hasText: "20 000 lines filtered out" }).waitFor();
      const cells = await page.locator(".results tbody tr").first().locator("td").allTextContents();
      assert.equal(cells[0], "fixed_window 139/1m, gcra 1000/1s burst 1000");

      // After an error, the results of the run before are gone.
      await page.locator("input[name=where]").fill("user");
      await page.getByRole("button", { name: "Run" }).click();
      await page.locator(".backtest .problem", { hasText: "expected FIELD=VALUE" }).waitFor();
      assert.equal(await page.locator(".results table").count(), 0);
    },
    { address: "#backtest", expected: [/400 .*v1\/backtest/] },
  );

  // A log without a usual name for the time: the error says what to set, and the page has a field for it.
  await drive(
    async (page) => {
      const buffer = Buffer.from("when;who\n1700000000;alice\n1700000001;bob\n");
      await page.locator("input[name=log]").setInputFiles({ name: "log.csv", mimeType: "text/csv", buffer });
      await page.locator("input[name=key]").fill("field:who");
      await page.getByRole("button", { name: "Run" }).click();
      await page.locator(".backtest .problem", { hasText: "`time` to the name of the time field" }).waitFor();
      await page.getByLabel("Time field").fill("when");
      await page.getByRole("button", { name: "Run" }).click();
      await page.locator(".results p", { hasText: "2 requests from 2 clients" }).waitFor();
    },
    { address: "#backtest", expected: [/400 .*v1\/backtest/] },
  );

  // The server's error for an invalid policy is shown.
  await drive(
    async (page) => {
      await page.locator("input[name=log]").setInputFiles(log);
      await page.locator("textarea[name=policies]").fill("token_bukcet 1/1m");
      await page.getByRole("button", { name: "Run" }).click();
      await page.locator(".backtest .problem", { hasText: "token_bukcet" }).waitFor();
    },
    { address: "#backtest", expected: [/400 .*v1\/backtest/] },
  );
} finally {
  rmSync(directory, { recursive: true });
}
