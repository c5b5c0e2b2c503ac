// Each lane shows its policy as TOML, which a server accepts, and as Rust; both can be copied.

import { execFileSync } from "node:child_process";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import os from "node:os";
import path from "node:path";
import { assert, ask, drive } from "./browser.mjs";

const directory = mkdtempSync(path.join(os.tmpdir(), "tallygate-code-"));
try {
  await drive(
    async (page) => {
      const { lanes } = await ask("v1/simulate", await page.evaluate(() => window.tallygate.scenario()));
      const dialog = page.getByRole("dialog");
      for (const [place, lane] of lanes.entries()) {
        await page.getByRole("button", { name: "Code" }).nth(place).click();
        assert.deepEqual(await dialog.locator("code").allTextContents(), [lane.toml, lane.rust]);
        await dialog.getByRole("button", { name: "Copy" }).first().click();
        await dialog.getByRole("button", { name: "Copied" }).waitFor();
        const file = path.join(directory, `${lane.algorithm}.toml`);
        writeFileSync(file, await page.evaluate(() => navigator.clipboard.readText()));
        assert.match(
          execFileSync(process.env.TALLYGATE, ["check-config", file], { encoding: "utf8" }),
          new RegExp(`${lane.algorithm} 7 per 10s`),
        );
        // No line is cut off.
        for (const pre of await dialog.locator("pre").all())
          assert.ok(await pre.evaluate(({ scrollWidth, clientWidth }) => scrollWidth <= clientWidth));
        await page.keyboard.press("Escape");
        await dialog.waitFor({ state: "hidden" });
      }
    },
    { address: "#compare?limit=7&burst=4", permissions: ["clipboard-read", "clipboard-write"] },
  );
} finally {
  rmSync(directory, { recursive: true });
}
